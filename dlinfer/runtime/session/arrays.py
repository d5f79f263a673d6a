"""Convert numpy arrays to tensors."""

from typing import Any, TypeAlias, cast

import numpy
import torch

Array: TypeAlias = numpy.ndarray[Any, Any]


def array_of(value: object) -> Array | None:
    """Return a numpy array or numpy scalar as an array; None for any other value."""
    is_array = isinstance(value, (numpy.ndarray, numpy.generic))
    return numpy.asarray(cast("Array", value)) if is_array else None


def torch_may_use(array: Array) -> bool:
    """Return whether a tensor may share the memory of a numpy array.

    The array must be writable, without negative strides.
    """
    return array.flags.writeable and all(stride >= 0 for stride in array.strides)


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory. If ``torch_may_use`` is false, return a copy.

    Raises TypeError or ValueError if torch has no such dtype, or does not have its byte order.
    """
    array = array if torch_may_use(array) else array.copy()
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType] - untyped in torch's stub
