"""LiteLayout, the types of elements, and the rules for other types."""

import numpy as np
import pytest

from dlinfer.vendor.megengine.errors import LiteArgumentError
from dlinfer.vendor.megengine.lite import LiteDataType, LiteLayout, LiteTensor

NAMES = ("int32", "float32", "uint8", "int8", "int16", "uint16", "float16")
TYPES = {
    "float32": LiteDataType.LITE_FLOAT,
    "float16": LiteDataType.LITE_HALF,
    "int32": LiteDataType.LITE_INT,
    "int16": LiteDataType.LITE_INT16,
    "int8": LiteDataType.LITE_INT8,
    "uint8": LiteDataType.LITE_UINT8,
    "uint16": LiteDataType.LITE_UINT16,
}


def through_the_library(layout: LiteLayout, name: str) -> None:
    """A tensor of it has numpy's size and gives back the extremes of its type."""
    tensor = LiteTensor(layout)
    assert tensor.nbytes == 6 * np.dtype(name).itemsize
    info = np.finfo(name) if name.startswith("float") else np.iinfo(name)
    data = np.array([[info.min, info.max, 0], [1, 2, 3]], name)
    tensor.set_data_by_copy(data)
    given = tensor.to_numpy()
    assert given.dtype == np.dtype(name)
    assert np.array_equal(given, data)


def test_layout_of_shape_and_dtype():
    layout = LiteLayout([2, 3], "int16")
    assert (layout.shapes, layout.ndim, layout.dtype) == ([2, 3], 2, np.int16)
    assert (LiteLayout().shapes, LiteLayout().ndim, LiteLayout([1]).dtype) == ([], 0, np.float32)
    layout.shapes = [6]
    assert (layout.shapes, layout.nbytes) == ([6], 12)
    assert layout == LiteLayout([6], np.int16) != LiteLayout([6], np.uint16)
    for shape in ([1] * 7, [-1], [2.5], ["a"]):
        with pytest.raises(LiteArgumentError, match="shape"):
            LiteLayout(shape)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", NAMES)
def test_dtype_by_name(name):
    through_the_library(LiteLayout([2, 3], name), name)


@pytest.mark.parametrize("name", NAMES)
def test_dtype_by_lite_data_type(name):
    assert LiteLayout([1], TYPES[name]).data_type == TYPES[name]
    through_the_library(LiteLayout([2, 3], TYPES[name]), name)


@pytest.mark.parametrize("name", NAMES)
def test_dtype_by_numpy_dtype(name):
    through_the_library(LiteLayout([2, 3], np.dtype(name)), name)


@pytest.mark.parametrize("name", NAMES)
def test_dtype_by_numpy_type(name):
    through_the_library(LiteLayout([2, 3], getattr(np, name)), name)


@pytest.mark.parametrize(
    "dtype", ["int64", "float64", "bool", np.uint32, np.dtype("complex64"), "nonsense", 3]
)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(LiteArgumentError, match="float32, float16, int32, int16, int8, uint8, uint16"):
        LiteLayout([2], dtype)


def test_int64_is_copied_as_int32_where_it_fits():
    tensor = LiteTensor(LiteLayout([3], "int32"))
    tensor.set_data_by_copy(np.array([-(2**31), 2**31 - 1, 5]))
    assert tensor.to_numpy().tolist() == [-(2**31), 2**31 - 1, 5]
    for beyond in (2**31, -(2**31) - 1):
        with pytest.raises(LiteArgumentError, match="values from -2147483648 to 2147483647"):
            tensor.set_data_by_copy(np.array([0, beyond, 0]))


def test_bool_is_copied_as_uint8():
    tensor = LiteTensor(LiteLayout([3], "uint8"))
    tensor.set_data_by_copy(np.array([True, False, True]))
    assert tensor.to_numpy().tolist() == [1, 0, 1]


def test_what_would_change_values_is_refused():
    tensor = LiteTensor(LiteLayout([2], "float32"))
    for data in (np.ones(2), np.ones(2, "c8"), np.ones(2, "u4"), np.ones(2, "u8"), np.array(["a", "b"])):
        with pytest.raises(LiteArgumentError, match="astype"):
            tensor.set_data_by_copy(data)
    for data in (np.ones(2, "i8"), np.ones(2, bool), np.ones(2)):
        with pytest.raises(LiteArgumentError, match="astype"):
            tensor.set_data_by_share(data)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("int8", [128], "from -128 to 127"),
        ("uint8", [-1], "from 0 to 255"),
        ("uint16", [65536], "from 0 to 65535"),
        ("int32", [2**40], "from -2147483648"),
        ("int32", [2**70], "list of numbers"),
        ("int32", [1.5], "integers"),
        ("float32", ["a"], "list of numbers"),
        ("float32", [[1], [2, 3]], "list of numbers"),
    ],
)
def test_lists_are_range_checked(name, values, why):
    with pytest.raises(LiteArgumentError, match=why):
        LiteTensor(LiteLayout([4], name)).set_data_by_copy(values)
