"""Checks of arguments of sail's calls: integers, real numbers, bools, shapes."""

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
    """Return ``form(*args, **kwargs)``. Raises SophgoCallError if the arguments do not fit its signature.

    call, forms: the call and its forms, for the message."""
    try:
        inspect.signature(form).bind(*args, **kwargs)
    except TypeError as error:
        raise refuse(call, f"{forms}: {error}") from None
    return form(*args, **kwargs)


def is_count(number: Any) -> bool:
    """Return whether a number is an integer of Python or numpy, at least 0 and not a bool."""
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 0


def real(call: str, what: str, number: Any) -> float:
    """Return a number of Python or numpy, not a bool, as float. Raises SophgoCallError."""
    if isinstance(number, Real) and not isinstance(number, bool):
        with contextlib.suppress(OverflowError):  # an int or fraction of hundreds of digits
            return float(number)
    raise refuse(call, f"{what} {number!r} is not a number that float32 can hold")


def finite(call: str, what: str, number: Any) -> float:
    """Return a number that is neither infinite nor NaN. Raises SophgoCallError."""
    value = real(call, what, number)
    if not isfinite(value):
        raise refuse(call, f"{what} {number!r} is not finite")
    return value


def yes_or_no(call: str, what: str, value: Any) -> bool:
    """Return the bool for a bool of Python or numpy, or for 0 or 1. Raises SophgoCallError for other values."""
    if isinstance(value, (bool, np.bool_)) or (is_count(value) and value <= 1):
        return bool(value)
    raise refuse(call, f"{what} must be True or False, given {value!r}")


def is_list(value: Any) -> bool:
    """Return whether a value is a sequence, but neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def shape_of(call: str, shape: Any) -> tuple[int, ...]:
    """Return a shape: 1 to 8 sizes above 0, of at most ``LARGEST`` elements. Raises SophgoCallError."""
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
