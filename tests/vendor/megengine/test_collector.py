"""TensorBatchCollector, on the real library."""

import ctypes
import inspect

import numpy as np
import pytest

from dlinfer.vendor.megengine.errors import LiteArgumentError, LiteError
from dlinfer.vendor.megengine.lite import (
    LiteDataType,
    LiteDeviceType,
    LiteLayout,
    LiteTensor,
    TensorBatchCollector,
)


def collector(shape=(4, 2, 3), dtype=LiteDataType.LITE_INT) -> TensorBatchCollector:
    return TensorBatchCollector(list(shape), dtype, LiteDeviceType.LITE_CPU)


def sample(value: int, shape=(2, 3)) -> np.ndarray:
    return np.full(shape, value, "int32")


def firsts(batch: TensorBatchCollector) -> list[int]:
    return batch.to_numpy().reshape(4, -1)[:, 0].tolist()


def test_defaults_are_int8_on_cuda():
    given = inspect.signature(TensorBatchCollector).parameters
    assert list(given) == ["shape", "dtype", "device_type", "device_id", "is_pinned_host", "tensor"]
    assert given["dtype"].default is LiteDataType.LITE_INT8
    assert given["device_type"].default is LiteDeviceType.LITE_CUDA
    with pytest.raises(LiteError, match="no LITE_CUDA"):
        TensorBatchCollector([4, 8])
    for dtype in LiteDataType:
        assert collector(dtype=dtype).get().layout == LiteLayout([4, 2, 3], dtype)
    with pytest.raises(LiteArgumentError, match="shape"):
        collector(())


def test_collect_id_in_any_order():
    batch = collector()
    for place in (1, 0, 3, 2):
        batch.collect_id(sample(place + 1), place)
    assert firsts(batch) == [1, 2, 3, 4]
    tensor = LiteTensor(LiteLayout([2, 3], "int32"))
    tensor.set_data_by_copy(sample(9))
    with pytest.warns(UserWarning, match="batch 2 was not freed"):
        batch.collect_id(tensor, 2)
    assert firsts(batch) == [1, 2, 9, 4]
    with pytest.raises(LiteArgumentError, match="0 to 3"):
        batch.collect_id(sample(1), 4)


def test_collect_by_ctypes_fills_the_first_free_place():
    batch = collector()
    batch.collect_id(sample(7), 0)
    data = sample(8)
    assert batch.collect_by_ctypes(ctypes.c_void_p(data.ctypes.data), data.nbytes) == 1
    assert firsts(batch)[:2] == [7, 8]
    with pytest.raises(LiteArgumentError, match="24 bytes"):
        batch.collect_by_ctypes(ctypes.c_void_p(data.ctypes.data), 23)


def test_collect_goes_from_first_to_last():
    batch = collector()
    assert [batch.collect(sample(value)) for value in range(4)] == [0, 1, 2, 3]
    assert firsts(batch) == [0, 1, 2, 3]
    with pytest.warns(UserWarning, match="all places are taken"):
        assert batch.collect(sample(5)) == -1
    assert firsts(batch) == [0, 1, 2, 3]


def test_free():
    batch = collector()
    for value in range(4):
        batch.collect(sample(value))
    batch.free(range(2))
    batch.free([3])
    assert [batch.collect(sample(9)) for _ in range(3)] == [0, 1, 3]
    assert firsts(batch) == [9, 9, 2, 9]
    batch.free([1])
    with pytest.warns(UserWarning, match="batch 1 is already free"):
        batch.free([1])
    with pytest.raises(LiteArgumentError, match="0 to 3"):
        batch.free([4])


def test_get_is_the_whole_tensor():
    batch = collector()
    batch.collect(sample(3))
    whole = batch.get()
    assert isinstance(whole, LiteTensor)
    assert whole.layout == LiteLayout([4, 2, 3], "int32")
    assert whole.to_numpy()[0].tolist() == sample(3).tolist()


def test_to_numpy_is_a_copy():
    batch = collector()
    batch.get().fill_zero()
    copy = batch.to_numpy()
    batch.collect(sample(3))
    assert not copy.any()


def test_refilling_and_an_own_tensor():
    own = LiteTensor(LiteLayout([4, 2, 3], "int32"))
    batch = TensorBatchCollector([4, 2, 3], tensor=own)  # dtype and device are the tensor's
    for turn in range(2):
        for value in range(4):
            batch.collect(sample(10 * turn + value))
        assert own.to_numpy()[:, 0, 0].tolist() == [10 * turn + value for value in range(4)]
        batch.free(range(4))
    with pytest.raises(LiteArgumentError, match="sizes"):
        TensorBatchCollector([4, 3, 2], tensor=own)


@pytest.mark.parametrize(
    "wrong", [sample(1, (3, 2)), np.ones((2, 3), "float32"), [[1]], np.ones((2, 3), "i8")]
)
def test_a_wrong_sample_takes_no_place(wrong):
    batch = collector()
    with pytest.raises(LiteArgumentError):
        batch.collect(wrong)
    assert batch.collect(sample(1)) == 0
