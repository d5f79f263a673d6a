"""What sail's calls are handed, checked before it is used: whole numbers, real ones, yes or no, shapes."""

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
    """Return the error of a call of sail's."""
    return SophgoCallError(call=f"sail.{call}", detail=detail)


def made_by(
    form: Callable[..., _Made], args: Sequence[Any], kwargs: Mapping[str, Any], call: str, forms: str
) -> _Made:
    """Return ``form(*args, **kwargs)``. Raises SophgoCallError, which begins with ``forms``, where it takes others."""
    try:
        inspect.signature(form).bind(*args, **kwargs)
    except TypeError as error:
        raise refuse(call, f"{forms}: {error}") from None
    return form(*args, **kwargs)


def is_count(number: Any) -> bool:
    """Return whether it is a whole number of at least 0, Python's or numpy's; a bool is none."""
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 0


def real(call: str, what: str, number: Any) -> float:
    """Return a number, Python's or numpy's, as float; a bool is none. Raises SophgoCallError."""
    if isinstance(number, Real) and not isinstance(number, bool):
        with contextlib.suppress(OverflowError):  # an int or fraction of hundreds of digits
            return float(number)
    raise refuse(call, f"{what} {number!r} is no number that float32 may hold")


def finite(call: str, what: str, number: Any) -> float:
    """Return a number that is neither infinite nor NaN. Raises SophgoCallError."""
    value = real(call, what, number)
    if not isfinite(value):
        raise refuse(call, f"{what} {number!r} is not finite")
    return value


def yes_or_no(call: str, what: str, given: Any) -> bool:
    """Return a bool, Python's or numpy's, or 0 or 1. Raises SophgoCallError."""
    if isinstance(given, (bool, np.bool_)) or (is_count(given) and given <= 1):
        return bool(given)
    raise refuse(call, f"{what} is True or False, given {given!r}")


def is_list(given: Any) -> bool:
    """Return whether it is a list or the like, and neither text nor bytes."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray))


def shape_of(call: str, shape: Any) -> tuple[int, ...]:
    """A shape of 1 to 8 sizes above 0, of at most as many elements as a tensor has bytes. Raises SophgoCallError."""
    given = shape.tolist() if isinstance(shape, np.ndarray) else shape
    whole = is_list(given) and all(
        isinstance(size, Integral) and not isinstance(size, bool) for size in given
    )
    if not whole:
        raise refuse(call, f"{shape!r} is no shape")
    sizes = tuple(map(int, given))
    if not 1 <= len(sizes) <= _MOST_DIMS or min(sizes) < 1:
        raise refuse(call, f"shape {list(sizes)}: 1 to {_MOST_DIMS} sizes of at least 1")
    if prod(sizes) > LARGEST:
        raise refuse(call, f"shape {list(sizes)}: a tensor has at most {LARGEST} bytes")
    return sizes
