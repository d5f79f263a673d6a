"""Lite's seven element types, their numpy types, and the conversion of other types.

Lite has float32, float16, int32, int16, int8, uint8 and uint16. A copy into a tensor converts int64 to int32 if every
value is in int32's range, and bool to uint8 (0 and 1). A tensor that uses the caller's memory cannot convert it, and
refuses int64 and bool. All other types (float64, bfloat16, uint32, uint64, complex) are always refused: a conversion
would silently lose digits or range."""

from typing import Any

import numpy as np

from dlinfer.vendor.megengine.errors import LiteArgumentError, LiteError
from dlinfer.vendor.megengine.lite.binding.checks import wrong
from dlinfer.vendor.megengine.lite.binding.enums import LiteDataType

NUMPY_TYPES: dict[LiteDataType, type[np.generic]] = {
    LiteDataType.LITE_FLOAT: np.float32,
    LiteDataType.LITE_HALF: np.float16,
    LiteDataType.LITE_INT: np.int32,
    LiteDataType.LITE_INT16: np.int16,
    LiteDataType.LITE_INT8: np.int8,
    LiteDataType.LITE_UINT8: np.uint8,
    LiteDataType.LITE_UINT16: np.uint16,
}
_LITE_TYPES = {np.dtype(numpy): lite for lite, numpy in NUMPY_TYPES.items()}
NAMES = ", ".join(str(np.dtype(numpy)) for numpy in NUMPY_TYPES.values())


def lite_type(dtype: Any, call: str) -> LiteDataType:
    """Return the LiteDataType of ``dtype``. Raises LiteArgumentError if Lite has no such type.

    dtype: a LiteDataType, a name such as "float32", or a numpy dtype or type; None means float32."""
    if dtype is None:
        return LiteDataType.LITE_FLOAT
    if isinstance(dtype, LiteDataType):
        return dtype
    try:
        lite = _LITE_TYPES.get(np.dtype(dtype)) if not isinstance(dtype, (int, np.integer)) else None
    except TypeError:
        lite = None
    if lite is None:
        raise wrong(call, "dtype", f"a LiteDataType or one of {NAMES}", repr(dtype))
    return lite


def numpy_type(number: int) -> type[np.generic]:
    """Return the numpy type of a LiteDataType's number. Raises LiteError for an undocumented number."""
    numpy = {int(lite): numpy for lite, numpy in NUMPY_TYPES.items()}.get(number)
    if numpy is None:
        raise LiteError(call="LiteLayout", detail=f"data_type {number} is none of {NAMES}")
    return numpy


def for_copying(array: np.ndarray, call: str) -> np.ndarray:
    """Return a contiguous array with the array's values, in one of Lite's seven types. Raises LiteArgumentError."""
    if array.dtype == np.int64:
        array = _fitting(array, np.dtype(np.int32), call)
    elif array.dtype == np.bool_:
        array = array.astype(np.uint8)
    elif array.dtype not in _LITE_TYPES:
        raise _refused(array.dtype, call)
    return np.ascontiguousarray(array).reshape(array.shape)


def for_sharing(array: np.ndarray, call: str) -> np.ndarray:
    """Return the array itself, whose memory a tensor is to use. Raises LiteArgumentError if a tensor cannot use it."""
    if array.dtype not in _LITE_TYPES:
        raise _refused(array.dtype, call)
    if not array.flags.c_contiguous:
        raise wrong(call, "data", "a contiguous array", f"strides {array.strides}")
    return array


def from_list(values: list[Any], dtype: np.dtype, call: str) -> np.ndarray:
    """Return a list of numbers as an array of ``dtype``. Raises LiteArgumentError.

    A floating ``dtype`` rounds the numbers, but refuses a finite number that would become infinite. An integer
    ``dtype`` takes only integers in its range."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:  # ragged, or beyond 64 bits
        raise wrong(call, "data", "a list of numbers", error) from error
    if array.dtype.kind not in "biuf" and array.size:
        raise wrong(call, "data", "a list of numbers", repr(array.dtype))
    if dtype.kind == "f":
        return _rounded(array, dtype, call)
    if array.dtype.kind == "f" and array.size:
        raise wrong(call, "data", f"integers for a tensor of {dtype}", "floats")
    return _fitting(array, dtype, call)


def _rounded(array: np.ndarray, dtype: np.dtype, call: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = array.astype(dtype)
    infinite = np.isfinite(array) & ~np.isfinite(values)
    lost = infinite if array.dtype.kind == "f" else values.astype(np.float64) != array
    if lost.any():
        raise wrong(call, "data", f"values that fit into {dtype}", repr(array[lost][0]))
    return values


def _fitting(array: np.ndarray, dtype: np.dtype, call: str) -> np.ndarray:
    info = np.iinfo(dtype)
    if array.size and (int(array.min()) < info.min or int(array.max()) > info.max):
        actual = f"{array.dtype} from {array.min()} to {array.max()}"
        raise wrong(call, "data", f"values from {info.min} to {info.max} ({dtype})", actual)
    return array.astype(dtype)


def _refused(dtype: np.dtype, call: str) -> LiteArgumentError:
    return wrong(call, "data", f"one of {NAMES} (convert it with astype)", dtype)
