"""numpy's arrays as tensors."""

from typing import Any, TypeAlias, cast

import numpy
import torch

Array: TypeAlias = numpy.ndarray[Any, Any]


def array_of(value: object) -> Array | None:
    """Return an array or a scalar of numpy as an array; None for any other value."""
    is_array = isinstance(value, (numpy.ndarray, numpy.generic))
    return numpy.asarray(cast("Array", value)) if is_array else None


def torch_may_use(array: Array) -> bool:
    """Whether a tensor may lie on the array's memory. torch has no negative strides, and writes where it likes."""
    return array.flags.writeable and all(stride >= 0 for stride in array.strides)


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor on the array's memory, or on a copy where torch may not use that.

    Raises TypeError or ValueError for a dtype that torch lacks, or has in another order of bytes.
    """
    array = array if torch_may_use(array) else array.copy()
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType] - torch names no type of the argument
