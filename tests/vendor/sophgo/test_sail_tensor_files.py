"""sail.Tensor's copies in strides and its files, as sophon-sail's manual describes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlinfer import settings
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import SophgoCallError
from dlinfer.vendor.sophgo.sail import Dtype


@pytest.fixture(params=["bm1684x", "bm1688"])
def handle(request, open_chips):
    with settings.override(sophgo_emulate=request.param):
        yield sail.Handle(0)


@pytest.fixture
def one(open_chips):
    """A handle of bm1684x."""
    with settings.override(sophgo_emulate="bm1684x"):
        yield sail.Handle(0)


# --- copies in strides


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint8])
@pytest.mark.parametrize("stride", [1, 3])
def test_each_third_element_of_another_tensor(handle, dtype, stride):
    data = np.arange(12).astype(dtype)
    source = sail.Tensor(handle, data, False, True)
    target = sail.Tensor(handle, np.full(6, 99, dtype), False, True)
    target.sync_d2d_stride(source, stride, 1, 4)
    assert (target.asnumpy() == [*data[: 4 * stride : stride], 99, 99]).all()


def test_bytes_to_each_fourth_place(handle):
    """What lies between stays."""
    source = sail.Tensor(handle, np.arange(1, 5, dtype=np.uint8), False, True)
    target = sail.Tensor(handle, np.full(14, 99, np.uint8), False, True)
    target.sync_d2d_stride(source, 1, 4, 3)
    assert (target.asnumpy() == [1, 99, 99, 99, 2, 99, 99, 99, 3, 99, 99, 99, 99, 99]).all()


def test_in_strides_between_devices_and_within_one_tensor(one):
    source = sail.Tensor(one, np.arange(6, dtype=np.int32), False, True)
    target = sail.Tensor(sail.Handle(1), [3], Dtype.BM_INT32, False, True)
    target.sync_d2d_stride(source, stride_src=2, stride_dst=1, count=3)
    assert (target.asnumpy() == [0, 2, 4]).all()
    source.sync_d2d_stride(source, 2, 1, 3)
    assert (source.asnumpy() == [0, 2, 4, 3, 4, 5]).all()
    source.sync_d2d_stride(target, 1, 1, 0)
    assert (source.asnumpy() == [0, 2, 4, 3, 4, 5]).all()


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ((1, 2, 1), "must be 1, or 4 for bytes"),
        ((2, 4, 1), "must be 1, or 4 for bytes"),
        ((1, 0, 1), "must be 1, or 4 for bytes"),
        ((0, 1, 1), "numbers of elements"),
        ((-1, 1, 1), "numbers of elements"),
        ((1, 1, 1.5), "numbers of elements"),
        ((3, 1, 4), "4 elements do not fit with stride 3 into 8 and with stride 1 into 8"),
        ((1, 4, 3), "3 elements do not fit with stride 1 into 8 and with stride 4 into 8"),
        ((1, 1, 9), "9 elements"),
    ],
)
def test_strides_that_do_not_fit_are_refused(one, numbers, match):
    source, target = (sail.Tensor(one, np.zeros(8, np.int8), False, True) for _ in range(2))
    with pytest.raises(SophgoCallError, match=match):
        target.sync_d2d_stride(source, *numbers)


def test_strides_of_other_types_and_without_device_memory_are_refused(one):
    wide = sail.Tensor(one, np.zeros(8, np.int32), False, True)
    with pytest.raises(SophgoCallError, match="must be 1, or 4 for bytes"):
        wide.sync_d2d_stride(wide, 1, 4, 1)
    with pytest.raises(SophgoCallError, match="BM_INT8 cannot be copied into one of BM_INT32"):
        wide.sync_d2d_stride(sail.Tensor(one, np.zeros(8, np.int8), False, True), 1, 1, 1)
    with pytest.raises(SophgoCallError, match="has no device memory"):
        wide.sync_d2d_stride(sail.Tensor(one, np.zeros(8, np.int32), True, False), 1, 1, 1)
    other: Any = np.zeros(8, np.int32)
    with pytest.raises(SophgoCallError, match=r"ndarray is not a sail\.Tensor"):
        wide.sync_d2d_stride(other, 1, 1, 1)


# --- files


VALUES = np.array([[[0, 1, -2], [3, 4.5, 100]]])


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.int32])
def test_dump_data(one, tmp_path, dtype, system):
    """Text that numpy.loadtxt reads, a line a row; or the bytes."""
    data = VALUES.astype(dtype)
    tensor = sail.Tensor(one, data, system, True)
    tensor.dump_data(str(tmp_path / "text"))
    assert (np.loadtxt(tmp_path / "text") == data[0].astype(np.float64)).all()
    tensor.dump_data(str(tmp_path / "bytes"), bin=True)
    assert (tmp_path / "bytes").read_bytes() == data.tobytes()


def test_dump_data_of_bfloat16_and_of_decimals(one, tmp_path):
    tensor = sail.Tensor(one, [2], Dtype.BM_BFLOAT16, True, False)
    tensor.memory_set(1.5)
    tensor.dump_data(str(tmp_path / "text"))
    assert (tmp_path / "text").read_text() == "1.5000 1.5000\n"


def test_dump_data_as_in_the_manual(one, tmp_path):
    data = np.ones([1, 20], dtype=int)
    tensor = sail.Tensor(one, data)
    tensor.scale_from(data, 0.01)
    tensor.dump_data(str(tmp_path / "temp.txt"))
    assert (np.loadtxt(tmp_path / "temp.txt") == tensor.asnumpy()).all()


@pytest.mark.parametrize("name", ["none/text", ".", "a\0b"])
@pytest.mark.parametrize("binary", [True, False])
def test_dump_data_to_what_cannot_be_written(one, tmp_path, name, binary):
    with pytest.raises(SophgoCallError, match="cannot be written"):
        sail.Tensor(one, np.ones(3, np.int8)).dump_data(str(Path(tmp_path) / name), binary)
