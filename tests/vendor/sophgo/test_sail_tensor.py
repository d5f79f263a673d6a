"""sail.Tensor, Handle and Dtype as sophon-sail's documents sail.Tensor and sail.Handle describe them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from dlinfer import settings
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import SophgoCallError
from dlinfer.vendor.sophgo.runtime.worker import SHARED_BYTES
from dlinfer.vendor.sophgo.sail import Dtype
from dlinfer.vendor.sophgo.sail.arrays import decoded, encoded, to_bfloat16
from dlinfer.vendor.sophgo.sail.types import NUMPY, OF_NUMPY


@pytest.fixture(params=["bm1684x", "bm1688"])
def handle(request, open_chips):
    with settings.override(sophgo_emulate=request.param):
        yield sail.Handle(0)


@pytest.fixture
def one(open_chips):
    """A handle of bm1684x."""
    with settings.override(sophgo_emulate="bm1684x"):
        yield sail.Handle(0)


# --- handles


def test_a_handle_says_which_device_it_is(handle, request):
    chip = request.node.callspec.params["handle"]
    assert handle.get_device_id() == 0
    assert handle.get_sn() == ""  # the emulator's
    assert handle.get_target() == chip.upper()


def test_a_handle_made_before_the_engine_is_on_the_engines_chip(bmodel, open_chips):
    handle = sail.Handle(7)
    engine = sail.EngineLLM(str(bmodel("bm1688")), [7])
    assert handle.get_target() == "BM1688"
    tensor = sail.Tensor(handle, engine.get_input_shape("mlp", 0), Dtype.BM_FLOAT16, False, True)
    assert tensor.device_memory().device is engine._model.devices[7]


@pytest.mark.parametrize("number", [-1, 1000, "0", None])
def test_a_handle_of_no_device_is_refused(open_chips, number):
    with pytest.raises(SophgoCallError, match="not a device number"):
        sail.Handle(number).get_target()


# --- making one


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]
)
def test_of_an_array(one, dtype):
    data = np.arange(24).reshape(2, 3, 4).astype(dtype)
    tensor = sail.Tensor(one, data)
    assert tensor.shape() == [2, 3, 4]
    assert tensor.dtype() is OF_NUMPY[np.dtype(dtype)]
    assert (tensor.own_sys_data(), tensor.own_dev_data()) == (True, True)
    assert (tensor.asnumpy().view(dtype) == data).all()
    tensor.sync_s2d()
    tensor.zeros()
    assert (tensor.asnumpy() == 0).all()


def test_of_an_array_it_has_its_own_copy(one):
    data = np.ones(4, np.float32)
    tensor = sail.Tensor(one, data)
    data[:] = 9
    tensor.asnumpy()[:] = 8
    assert (tensor.asnumpy() == 1).all()


def test_of_an_array_that_does_not_lie_in_one_piece(one):
    data = np.arange(12, dtype=np.int32).reshape(3, 4).T
    assert (sail.Tensor(one, data).asnumpy() == data).all()


def test_of_an_array_on_the_device_only(handle):
    """own_sys_data=False and own_dev_data=True: the data goes to the device."""
    data = np.arange(6, dtype=np.float32)
    tensor = sail.Tensor(handle, data, False, True)
    assert (tensor.own_sys_data(), tensor.own_dev_data()) == (False, True)
    assert (tensor.asnumpy() == data).all()


def test_of_an_array_in_system_memory_only(one):
    tensor = sail.Tensor(one, np.arange(6, dtype=np.int8), own_dev_data=False)
    assert (tensor.own_sys_data(), tensor.own_dev_data(), tensor.device_id()) == (True, False, -1)
    with pytest.raises(SophgoCallError, match="has no device memory"):
        tensor.sync_s2d()


def test_of_64_bit_integers_that_fit_into_32(one):
    """As in the document's examples, np.array([1, 2, 3])."""
    tensor = sail.Tensor(one, np.array([1, 2, 3]))
    assert tensor.dtype() is Dtype.BM_INT32
    assert (tensor.asnumpy() == [1, 2, 3]).all()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (np.array([2**31]), "do not fit into int32"),
        (np.zeros(3), "tensors do not have dtype float64"),
        (np.zeros(3, bool), "tensors do not have dtype bool"),
        (np.zeros((2, 0), np.float32), "cannot be a tensor"),
        (np.array(1, np.float32), "cannot be a tensor"),
    ],
)
def test_of_other_arrays_is_refused(one, data, match):
    with pytest.raises(SophgoCallError, match=match):
        sail.Tensor(one, data)


def test_of_a_shape(handle):
    tensor = sail.Tensor(handle, [2, 5], Dtype.BM_INT8, True, True)
    assert (tensor.shape(), tensor.size(), tensor.element_size(), tensor.nbytes()) == ([2, 5], 10, 1, 10)
    assert (tensor.asnumpy() == 0).all()
    assert sail.Tensor(handle, (1, 3), sail.BM_FLOAT32, False, True).nbytes() == 12


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([2, 0], Dtype.BM_INT8, True, True), "sizes of at least 1"),
        (([], Dtype.BM_INT8, True, True), "1 to 8 sizes"),
        (([1] * 9, Dtype.BM_INT8, True, True), "1 to 8 sizes"),
        (("ab", Dtype.BM_INT8, True, True), "not a shape"),
        (([2], 0, True, True), "not a sail.Dtype"),
        (([2], Dtype.BM_INT8), "none of its forms"),
        (([2**31, 4], Dtype.BM_FLOAT32, False, True), "bytes"),
    ],
)
def test_of_other_shapes_is_refused(one, arguments, match):
    with pytest.raises(SophgoCallError, match=match):
        sail.Tensor(one, *arguments)


def test_of_neither_a_handle_nor_a_tensor_is_refused():
    arguments: list[Any] = [0, [1], Dtype.BM_INT8, True, True]
    with pytest.raises(SophgoCallError, match=r"neither a sail\.Handle"):
        sail.Tensor(*arguments)


def test_a_part_of_another_tensor(handle):
    """The third form: the same device memory from an element on; nothing is copied."""
    whole = sail.Tensor(handle, np.arange(12, dtype=np.float32), False, True)
    part = sail.Tensor(whole, [2, 2], 5)
    assert (part.asnumpy() == [[5, 6], [7, 8]]).all()
    assert (part.own_sys_data(), part.own_dev_data()) == (False, False)
    part.update_data(np.full((2, 2), -1, np.float32))
    assert (whole.asnumpy() == [0, 1, 2, 3, 4, -1, -1, -1, -1, 9, 10, 11]).all()
    del whole
    assert (part.asnumpy() == -1).all()


@pytest.mark.parametrize(("shape", "offset"), [([13], 0), ([1], 12), ([4], -1), ([4], 1.5)])
def test_a_part_beyond_the_other_tensor_is_refused(one, shape, offset):
    whole = sail.Tensor(one, np.arange(12, dtype=np.float32), False, True)
    with pytest.raises(SophgoCallError, match="from element"):
        sail.Tensor(whole, shape, offset)


# --- data in and out


def test_asnumpy_of_another_shape(one):
    tensor = sail.Tensor(one, np.array([1, 2, 3]))
    assert tensor.asnumpy((3, 1)).shape == (3, 1)
    assert (tensor.asnumpy((2,)) == [1, 2]).all()
    with pytest.raises(SophgoCallError, match="4 elements"):
        tensor.asnumpy((4,))


def test_without_any_memory_there_is_nothing_to_read(one):
    with pytest.raises(SophgoCallError, match="no device memory"):
        sail.Tensor(one, [3], Dtype.BM_INT8, False, False).asnumpy()


@pytest.mark.parametrize("system", [True, False])
def test_update_data(handle, system):
    """The tensor's own shape stays, fewer elements are written over the first; system memory goes before."""
    tensor = sail.Tensor(handle, [2, 3], Dtype.BM_FLOAT32, system, True)
    tensor.zeros()
    tensor.update_data(np.arange(4, dtype=np.float32))
    assert (tensor.asnumpy() == [[0, 1, 2], [3, 0, 0]]).all()
    if system:
        tensor.sync_d2s()
        assert (tensor.asnumpy() == 0).all()


def test_update_data_of_float16_as_bits_or_as_float16(one):
    tensor = sail.Tensor(one, [2], Dtype.BM_FLOAT16, True, True)
    for data in (np.array([1.5, -2], np.float16), np.array([1.5, -2], np.float16).view(np.uint16)):
        tensor.zeros()
        tensor.update_data(data)
        assert (tensor.asnumpy().view(np.float16) == [1.5, -2]).all()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (np.zeros(6, np.int8), "takes float32"),
        (np.zeros(6), "float64"),
        (np.zeros(7, np.float32), "7 elements"),
        ([1.0, 2.0], "not a numpy.ndarray"),
    ],
)
def test_update_data_of_other_data_is_refused(one, data, match):
    tensor = sail.Tensor(one, [2, 3], Dtype.BM_FLOAT32, True, True)
    with pytest.raises(SophgoCallError, match=match):
        tensor.update_data(data)


def test_scale_from_and_scale_to(one):
    tensor = sail.Tensor(one, [4], Dtype.BM_INT8, True, True)
    tensor.scale_from(np.array([0.26, -0.26, 100, -100], np.float32), 10.0)
    assert (tensor.asnumpy() == [3, -3, 127, -128]).all()
    assert tensor.scale_to(0.5).dtype == np.float32
    assert (tensor.scale_to(0.5) == [1.5, -1.5, 63.5, -64]).all()
    assert tensor.scale_to(1.0, (2, 2)).shape == (2, 2)
    tensor.scale_from(np.array([1, 2]), 2.0)
    assert (tensor.asnumpy()[:2] == [2, 4]).all()


def test_scaling_needs_system_memory(one):
    tensor = sail.Tensor(one, [4], Dtype.BM_INT8, False, True)
    with pytest.raises(SophgoCallError, match="has no system memory"):
        tensor.scale_from(np.zeros(4, np.float32), 1.0)
    with pytest.raises(SophgoCallError, match="has no system memory"):
        tensor.scale_to(1.0)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_memory_set_zeros_and_ones(handle, dtype):
    tensor = sail.Tensor(handle, [3, 5], dtype, True, True)
    for fill, value in ((tensor.ones, 1), (tensor.zeros, 0), (lambda: tensor.memory_set(3), 3)):
        fill()
        assert (decoded(tensor.asnumpy(), dtype) == value).all()
        tensor.sync_d2s()
        assert (decoded(tensor.asnumpy(), dtype) == value).all()


def test_reshape(one):
    tensor = sail.Tensor(one, np.arange(6, dtype=np.int32))
    tensor.reshape([3, 2])
    assert (tensor.asnumpy() == [[0, 1], [2, 3], [4, 5]]).all()
    tensor.reshape([2])
    tensor.reshape([6])  # as large as it was made
    with pytest.raises(SophgoCallError, match="more than its 24 bytes"):
        tensor.reshape([7])


# --- between system and device memory


def test_sync_of_all_of_it(handle):
    tensor = sail.Tensor(handle, np.arange(5, dtype=np.float32))
    tensor.sync_s2d()
    tensor.update_data(np.zeros(5, np.float32))
    tensor.sync_d2s()
    assert (tensor.asnumpy() == np.arange(5)).all()


def test_sync_of_a_number_of_bytes(handle):
    tensor = sail.Tensor(handle, np.arange(1, 6, dtype=np.int32))
    tensor.sync_s2d()
    tensor.update_data(np.full(5, 9, np.int32))
    tensor.sync_s2d(8)
    tensor.update_data(np.zeros(5, np.int32))
    tensor.sync_d2s(size=16)
    assert (tensor.asnumpy() == [9, 9, 3, 4, 0]).all()


def test_sync_of_elements_of_another_tensor(handle):
    source = sail.Tensor(handle, np.arange(10, dtype=np.float32))
    target = sail.Tensor(handle, np.zeros(6, np.float32))
    target.sync_s2d()
    target.sync_s2d(source, 7, 1, 3)  # source's system memory to target's device
    target.sync_d2s()
    assert (target.asnumpy() == [0, 7, 8, 9, 0, 0]).all()
    source.sync_s2d()
    target.sync_d2s(source, 2, 4, 2)  # source's device to target's system memory
    assert (target.asnumpy() == [0, 7, 8, 9, 2, 3]).all()
    target.sync_d2d(source, 4, 0, 3)  # source's device to target's device
    target.sync_d2s()
    assert (target.asnumpy() == [4, 5, 6, 9, 0, 0]).all()


def test_sync_between_devices(open_chips):
    with settings.override(sophgo_emulate="bm1684x"):
        source = sail.Tensor(sail.Handle(0), np.arange(4, dtype=np.int8), False, True)
        target = sail.Tensor(sail.Handle(1), [4], Dtype.BM_INT8, False, True)
    target.sync_d2d(source, 0, 0, 4)
    assert (target.asnumpy() == [0, 1, 2, 3]).all()


def test_data_larger_than_the_shared_memory_goes_in_pieces(one):
    data = np.random.RandomState(0).randint(0, 256, SHARED_BYTES * 2 + 12345).astype(np.uint8)
    tensor = sail.Tensor(one, data, False, True)
    assert (tensor.asnumpy() == data).all()


@pytest.mark.parametrize("call", ["sync_s2d", "sync_d2s"])
@pytest.mark.parametrize("arguments", [(21,), (-1,), ("1",), (1, 2), (None, 0, 0, 1), ()])
def test_sync_of_what_does_not_fit_is_refused(one, call, arguments):
    tensor = sail.Tensor(one, [5], Dtype.BM_INT32, bool(arguments), True)
    if not arguments:
        with pytest.raises(SophgoCallError, match="has no system memory"):
            getattr(tensor, call)()
        return
    with pytest.raises(SophgoCallError, match=r"Tensor\.sync"):
        getattr(tensor, call)(*arguments)


@pytest.mark.parametrize("call", ["sync_s2d", "sync_d2s", "sync_d2d"])
@pytest.mark.parametrize("numbers", [(0, 0, 6), (5, 0, 1), (0, 5, 1), (-1, 0, 1), (0, 0, -1), (0, 1.5, 1)])
def test_sync_of_elements_beyond_the_tensors_is_refused(one, call, numbers):
    source, target = (sail.Tensor(one, [5], Dtype.BM_INT32, True, True) for _ in range(2))
    with pytest.raises(SophgoCallError, match="elements"):
        getattr(target, call)(source, *numbers)


def test_sync_of_another_type_is_refused(one):
    source = sail.Tensor(one, [5], Dtype.BM_INT8, True, True)
    with pytest.raises(SophgoCallError, match="BM_INT8 cannot be copied into one of BM_INT32"):
        sail.Tensor(one, [5], Dtype.BM_INT32, True, True).sync_d2d(source, 0, 0, 1)


def test_device_memory_comes_back(one):
    """4 GiB of device in all: 40 tensors of 256 MiB, one after the other."""
    for _ in range(40):
        sail.Tensor(one, [2**28], Dtype.BM_INT8, False, True)


# --- types


def test_data_types_have_the_numbers_of_bmruntime():
    names = "FLOAT32 FLOAT16 INT8 UINT8 INT16 UINT16 INT32 UINT32 BFLOAT16".split()
    assert [Dtype[f"BM_{name}"] for name in names] == list(range(9))
    assert [getattr(sail, f"BM_{name}") for name in names] == list(Dtype)


FREE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@hypothesis_settings(deadline=None, suppress_health_check=FREE, max_examples=30)
@given(st.data())
def test_any_array_goes_to_the_device_and_comes_back(one, data):
    dtype = data.draw(st.sampled_from(sorted(OF_NUMPY, key=str)))
    shape = data.draw(nps.array_shapes(max_dims=8, max_side=4))
    array = data.draw(nps.arrays(dtype, shape))
    back = sail.Tensor(one, array, False, True).asnumpy()
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


FLOATING = [Dtype.BM_FLOAT32, Dtype.BM_FLOAT16, Dtype.BM_BFLOAT16]


@hypothesis_settings(deadline=None, suppress_health_check=FREE)
@given(st.floats(width=32), st.sampled_from(list(Dtype)))
def test_a_number_as_an_element(value: float, dtype: Dtype):
    element = encoded(np.array([value], np.float32), dtype) if dtype in FLOATING else None
    if element is None:
        if not np.isfinite(value):
            return
        found = int(encoded(np.array([value], np.float32), dtype)[0])
        limits = np.iinfo(NUMPY[dtype])
        assert found == min(max(round(float(np.float32(value))), limits.min), limits.max)
        return
    back = float(decoded(element, dtype)[0])
    if np.isnan(value):
        assert np.isnan(back)
    elif dtype == Dtype.BM_FLOAT32:
        assert back == value
    elif dtype == Dtype.BM_FLOAT16:
        with np.errstate(over="ignore"):
            assert back == float(np.float16(np.float32(value)))
    else:
        import torch

        assert back == torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).item()


def test_bfloat16_of_what_is_no_number():
    assert np.isnan(decoded(to_bfloat16(np.array([np.nan, -np.nan])), Dtype.BM_BFLOAT16)).all()
