"""Checks of the arguments of sail's calls: integers, real numbers, bools and shapes."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from dlinfer.vendor.sophgo.errors import SophgoCallError
from dlinfer.vendor.sophgo.runtime.device import LARGEST

_MOST_DIMS = 8
_Made = TypeVar("_Made")


def refuse(call: str, detail: str) -> SophgoCallError:
    return SophgoCallError(call=f"sail.{call}", detail=detail)


def made_by(
    form: Callable[..., _Made], args: Sequence[Any], kwargs: Mapping[str, Any], call: str, forms: str
) -> _Made:
    """Return ``form(*args, **kwargs)``. Raises SophgoCallError if ``form`` does not take these arguments.

    call: the name of the user's call, for the message.
    forms: a sentence for the message, such as "the arguments match none of its three forms"."""
    try:
        inspect.signature(form).bind(*args, **kwargs)
    except TypeError as error:
        raise refuse(call, f"{forms}: {error}") from None
    return form(*args, **kwargs)


def is_count(number: Any) -> bool:
    """Return whether a value is a Python or numpy integer of at least 0, but not a bool."""
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 0


def real(call: str, what: str, number: Any) -> float:
    """Return a Python or numpy number as a float. Raises SophgoCallError for other values, such as a bool."""
    if isinstance(number, Real) and not isinstance(number, bool):
        with contextlib.suppress(OverflowError):  # an int or fraction of hundreds of digits
            return float(number)
    raise refuse(call, f"{what} {number!r} is not a number that float32 can hold")


def finite(call: str, what: str, number: Any) -> float:
    """Return a Python or numpy number as a float. Raises SophgoCallError for infinity, NaN and other values."""
    value = real(call, what, number)
    if not isfinite(value):
        raise refuse(call, f"{what} {number!r} is not finite")
    return value


def yes_or_no(call: str, what: str, value: Any) -> bool:
    """Return a Python or numpy bool, or the number 0 or 1, as a bool. Raises SophgoCallError for other values."""
    if isinstance(value, (bool, np.bool_)) or (is_count(value) and value <= 1):
        return bool(value)
    raise refuse(call, f"{what} must be True or False, given {value!r}")


def is_list(value: Any) -> bool:
    """Return whether a value is a sequence, but neither str nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def shape_of(call: str, shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple. Raises SophgoCallError unless it has 1 to 8 sizes of at least 1.

    Also raises it if there are more than ``LARGEST`` elements."""
    items = shape.tolist() if isinstance(shape, np.ndarray) else shape
    whole = is_list(items) and all(
        isinstance(size, Integral) and not isinstance(size, bool) for size in items
    )
    if not whole:
        raise refuse(call, f"{shape!r} is not a shape")
    sizes = tuple(map(int, items))
    if not 1 <= len(sizes) <= _MOST_DIMS or min(sizes) < 1:
        raise refuse(call, f"shape {list(sizes)} must have 1 to {_MOST_DIMS} sizes of at least 1")
    if prod(sizes) > LARGEST:
        raise refuse(call, f"shape {list(sizes)}: a tensor has at most {LARGEST} bytes")
    return sizes
