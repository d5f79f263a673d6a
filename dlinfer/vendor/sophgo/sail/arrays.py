"""Check numpy arrays that go into tensors, and convert numbers to and from the elements of tensors."""

from math import trunc
from typing import Any

import numpy as np

from dlinfer.vendor.sophgo.sail.checks import finite, real, refuse
from dlinfer.vendor.sophgo.sail.types import FLOATING, NUMPY, OF_NUMPY, Dtype


def taken(call: str, data: Any) -> np.ndarray:
    """Return ``data`` as a contiguous array that a tensor can take. 64-bit integers become int32.

    Raises SophgoCallError if ``data`` is not an array, is empty, or has a dtype or a value that no tensor can have."""
    if not isinstance(data, np.ndarray):
        raise refuse(call, f"{type(data).__name__} is not a numpy.ndarray")
    if data.dtype in (np.int64, np.uint64):
        data = _narrowed(call, data)
    if data.dtype not in OF_NUMPY:
        raise refuse(
            call, f"tensors do not have dtype {data.dtype}; allowed: {', '.join(map(str, OF_NUMPY))}"
        )
    if not data.size or not data.ndim:
        raise refuse(call, f"an array of shape {list(data.shape)} cannot be a tensor")
    return np.ascontiguousarray(data)


def _narrowed(call: str, data: np.ndarray) -> np.ndarray:
    small = np.dtype(np.int32)
    if data.size and not (np.iinfo(small).min <= data.min() and data.max() <= np.iinfo(small).max):
        raise refuse(call, f"{data.dtype} values do not fit into int32, the widest integer of a chip")
    return data.astype(small)


def fitting(call: str, data: Any, dtype: Dtype) -> np.ndarray:
    """Return ``data`` as the elements of a tensor of ``dtype``. float16 becomes uint16 with the same bits.

    Raises SophgoCallError for an array of another dtype."""
    array = taken(call, data)
    if array.dtype == np.float16 and dtype == Dtype.BM_FLOAT16:
        return array.view(np.uint16)
    kind = NUMPY[dtype]
    if array.dtype != kind:
        raise refuse(
            call, f"an array of {data.dtype} does not fit a tensor of {dtype.name}, which takes {kind}"
        )
    return array


def to_bfloat16(values: Any) -> np.ndarray:
    """Round float32 to bfloat16, to nearest even. Return the bits as uint16. NaN stays NaN."""
    wide = np.ascontiguousarray(values, np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), np.uint32(0x7FC0), rounded).astype(np.uint16)


def encoded(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Convert numbers to elements of ``dtype``. Floats beyond its range become infinity.

    For an integer ``dtype``, numbers are rounded to nearest and clamped to its range, and ``values`` must not have
    NaN."""
    with np.errstate(over="ignore"):  # to infinity
        if dtype == Dtype.BM_BFLOAT16:
            return to_bfloat16(values)
        if dtype == Dtype.BM_FLOAT16:
            return values.astype(np.float16).view(np.uint16)
        kind = NUMPY[dtype]
        if kind.kind == "f":
            return values.astype(kind)
    limits = np.iinfo(kind)
    return np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max).astype(kind)


def element(call: str, number: Any, dtype: Dtype) -> np.ndarray:
    """Return a number as an array with one element of ``dtype``. An integer ``dtype`` drops the fraction, as C does.

    Raises SophgoCallError for a number beyond the range of ``dtype``."""
    if dtype in FLOATING:
        value = real(call, "the number", number)
        array = encoded(np.array([value]), dtype)
        fits = not np.isfinite(value) or np.isfinite(decoded(array, dtype)[0])
    else:
        value = float(trunc(finite(call, "the number", number)))
        array = encoded(np.array([value]), dtype)
        fits = array[0] == value
    if not fits:
        raise refuse(call, f"{number!r} is beyond the range of {dtype.name}")
    return array


def decoded(array: np.ndarray, dtype: Dtype) -> np.ndarray:
    if dtype == Dtype.BM_BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == Dtype.BM_FLOAT16:
        return array.view(np.float16).astype(np.float32)
    return array.astype(np.float32)
