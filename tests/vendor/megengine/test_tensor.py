"""LiteTensor, on the real library."""

import ctypes
import gc
import weakref

import numpy as np
import pytest

from dlinfer.vendor.megengine.errors import LiteArgumentError, LiteError
from dlinfer.vendor.megengine.lite import LiteDeviceType, LiteLayout, LiteTensor
from tests.resident import resident
from tests.vendor.megengine.running import loaded, run


def filled(shape=(4, 8), dtype="int32") -> LiteTensor:
    tensor = LiteTensor(LiteLayout(shape, dtype))
    tensor.set_data_by_copy(list(range(int(np.prod(shape)))))
    return tensor


def values(shape=(4, 8), dtype="int32") -> np.ndarray:
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape)


def address(tensor: LiteTensor) -> int | None:
    return tensor.get_ctypes_memory().value


def test_tensor_construction():
    tensor = LiteTensor(LiteLayout([4, 16], "float32"), LiteDeviceType.LITE_CPU, 0, False)
    assert (tensor.layout.shapes, tensor.device_type, tensor.device_id) == ([4, 16], 0, 0)
    assert LiteTensor().layout.ndim == 0
    with pytest.raises(LiteArgumentError, match="LiteLayout"):
        LiteTensor([4, 16])  # pyright: ignore[reportArgumentType]


def test_shapes_and_dtype_make_the_layout():
    assert LiteTensor(shapes=[4, 16], dtype="float16").layout == LiteLayout([4, 16], "float16")
    assert LiteTensor(shapes=[4, 16]).layout == LiteLayout([4, 16], "float32")


def test_device_types():
    names = {one.name: one.value for one in LiteDeviceType}
    assert names == {
        "LITE_CPU": 0,
        "LITE_CUDA": 1,
        "LITE_ATLAS": 3,
        "LITE_NPU": 4,
        "LITE_DEVICE_DEFAULT": 5,
    }
    layout = LiteLayout([2])
    assert LiteTensor(layout, LiteDeviceType.LITE_DEVICE_DEFAULT).nbytes == 8
    for absent in (LiteDeviceType.LITE_ATLAS, LiteDeviceType.LITE_NPU):
        with pytest.raises(LiteError):
            LiteTensor(layout, absent)
    for unknown in (2, 6, 99):
        with pytest.raises(LiteArgumentError, match="LITE_CPU, LITE_CUDA"):
            LiteTensor(layout, unknown)


def test_memory_is_allocated_when_it_is_needed():
    before = resident()
    tensor = LiteTensor(LiteLayout([128, 1024, 1024], "uint8"))
    assert resident() - before < 2**24
    tensor.fill_zero()
    assert resident() - before > 2**26


def test_layout_can_be_read_and_set():
    tensor = LiteTensor(LiteLayout([2, 3], "float32"))
    tensor.layout = LiteLayout([3, 5], "int8")
    assert (tensor.layout, tensor.nbytes) == (LiteLayout([3, 5], "int8"), 15)
    tensor.layout = [7]
    assert tensor.layout == LiteLayout([7], "int8")


def test_is_pinned_host():
    assert not LiteTensor(LiteLayout([2])).is_pinned_host
    assert LiteTensor(LiteLayout([2]), is_pinned_host=True).is_pinned_host
    default = LiteTensor(LiteLayout([2]), LiteDeviceType.LITE_DEVICE_DEFAULT, is_pinned_host=True)
    default.set_data_by_copy([1.0, 2.0])
    assert default.to_numpy().tolist() == [1, 2]


def test_device_type():
    for given in (LiteDeviceType.LITE_CPU, LiteDeviceType.LITE_DEVICE_DEFAULT):
        assert LiteTensor(LiteLayout([2]), given).device_type is given


def test_device_id():
    for given in (0, 1, 3):  # of a CPU each number is a queue of its own
        assert LiteTensor(LiteLayout([2]), device_id=given).device_id == given


def test_is_continue():
    tensor = filled()
    assert tensor.is_continue
    assert not tensor.slice([0, 2], [4, 4]).is_continue
    assert tensor.slice([1], [3]).is_continue


def test_nbytes():
    assert LiteTensor(LiteLayout([4, 32], "int16")).nbytes == 256
    assert LiteTensor().nbytes == 0


def test_get_ctypes_memory_allocates():
    tensor = LiteTensor(LiteLayout([2, 4], "int32"))
    memory = tensor.get_ctypes_memory()
    assert isinstance(memory, ctypes.c_void_p)
    ctypes.memmove(memory, values((2, 4)).ctypes.data, 32)
    assert np.array_equal(tensor.to_numpy(), values((2, 4)))
    assert address(tensor) == memory.value


def test_reshape_keeps_the_elements():
    tensor = filled()
    tensor.reshape([8, 2, 2])
    assert np.array_equal(tensor.to_numpy(), values((8, 2, 2)))
    with pytest.raises(LiteArgumentError, match="as many elements"):
        tensor.reshape([5])
    assert tensor.layout.shapes == [8, 2, 2]


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [
        ([1, 4], [3, 8], None),
        ([1], [3], None),
        ([0, 0], [4, 8], [2, 3]),
        ([3, 7], [4, 8], [1, 1]),
        ([0, 0], [4, 8], [9, 9]),
    ],
)
def test_slice_is_a_view(start, end, step):
    tensor = filled()
    part = tensor.slice(start, end, step)
    expected = values()[tuple(slice(*one) for one in zip(start, end, step or [1] * len(start), strict=True))]
    assert np.array_equal(part.to_numpy(), expected)
    part.fill_zero()
    expected[...] = 0
    zeros = tensor.to_numpy()[tuple(slice(*one) for one in zip(start, end, step or [1] * 2, strict=False))]
    assert not zeros.any()


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [
        ([0], [5], None),
        ([3], [3], None),
        ([0, 0], [1], None),
        ([0] * 3, [1] * 3, None),
        ([-1], [2], None),
        ([0], [2], [0]),
    ],
)
def test_slice_refuses_what_lies_outside(start, end, step):
    with pytest.raises(LiteArgumentError, match="slice"):
        filled().slice(start, end, step)


def test_fill_zero():
    tensor = filled()
    tensor.fill_zero()
    assert not tensor.to_numpy().any()
    with pytest.raises(LiteError, match="empty layout"):
        LiteTensor().fill_zero()


def test_copy_from_takes_the_layout_over():
    source, target = filled((4, 8), "int16"), LiteTensor(LiteLayout([2, 2], "float32"))
    target.copy_from(source)
    assert target.layout == source.layout
    assert np.array_equal(target.to_numpy(), values((4, 8), "int16"))
    assert address(target) != address(source)
    part = source.slice([1, 4], [3, 8])
    target.copy_from(part)
    assert np.array_equal(target.to_numpy(), values((4, 8))[1:3, 4:8])
    with pytest.raises(LiteArgumentError, match="src_tensor"):
        part.copy_from(source)
    with pytest.raises(LiteArgumentError, match="a LiteTensor"):
        target.copy_from(values())  # pyright: ignore[reportArgumentType]


def test_share_memory_with_takes_everything_over():
    source, target = filled((4, 8), "int16"), LiteTensor(LiteLayout([1], "int8"))
    target.share_memory_with(source)
    assert (target.layout, address(target)) == (source.layout, address(source))
    source.fill_zero()
    assert not target.to_numpy().any()


def test_shared_memory_of_the_callers_stays_alive():
    array = np.arange(4, dtype="float32")
    alive = weakref.ref(array)
    source, target = LiteTensor(LiteLayout([4])), LiteTensor()
    source.set_data_by_share(array)
    target.share_memory_with(source)
    del source, array
    gc.collect()
    assert alive() is not None
    assert target.to_numpy().tolist() == [0, 1, 2, 3]


def test_update():
    tensor = filled()
    tensor.update()
    assert tensor.layout == LiteLayout([4, 8], "int32")
    handle, tensor._handle = tensor._handle, ctypes.c_void_p()
    with pytest.raises(LiteError, match="null"):
        tensor.update()
    tensor._handle = handle


def test_set_data_by_copy_takes_lists_arrays_and_addresses():
    expected = values((2, 16), "int8")
    for data, length in (
        (list(range(32)), 0),
        (expected, 0),
        (ctypes.c_void_p(expected.ctypes.data), 32),
    ):
        tensor = LiteTensor(LiteLayout([2, 16], "int8"))
        tensor.set_data_by_copy(data, length)
        assert np.array_equal(tensor.to_numpy(), expected)
        assert address(tensor) != expected.ctypes.data
    for wrong in ((1, 2), "text", None, 5):
        with pytest.raises(LiteArgumentError, match="a list, an ndarray or a c_void_p"):
            LiteTensor(LiteLayout([2])).set_data_by_copy(wrong)


def test_a_list_leaves_the_layout():
    tensor = LiteTensor(LiteLayout([2, 4], "int32"))
    tensor.fill_zero()
    tensor.set_data_by_copy([7, 8, 9])
    assert tensor.to_numpy().tolist() == [[7, 8, 9, 0], [0, 0, 0, 0]]
    with pytest.raises(LiteArgumentError, match="at most 8 numbers"):
        tensor.set_data_by_copy(list(range(9)))
    tensor.set_data_by_copy([])
    assert tensor.to_numpy()[0, 0] == 7


def test_an_array_of_another_size_brings_its_layout():
    tensor = LiteTensor(LiteLayout([2, 4], "int32"))
    tensor.set_data_by_copy(values((3, 5), "int16"))
    assert tensor.layout == LiteLayout([3, 5], "int16")
    assert np.array_equal(tensor.to_numpy(), values((3, 5), "int16"))


def test_an_array_of_the_same_size_does_not():
    tensor = LiteTensor(LiteLayout([2, 4], "int32"))
    tensor.set_data_by_copy(values((4, 2)))
    assert tensor.layout.shapes == [2, 4]
    with pytest.raises(LiteArgumentError, match="the tensor's dtype int32, given float32"):
        tensor.set_data_by_copy(np.ones((2, 4), "float32"))


def test_strided_arrays_are_packed_first():
    tensor = LiteTensor(LiteLayout([8, 4], "int32"))
    tensor.set_data_by_copy(values().T)
    assert np.array_equal(tensor.to_numpy(), values().T)


def test_an_address_needs_the_length_or_a_layout():
    data = values((2, 4))
    pointer, tensor = ctypes.c_void_p(data.ctypes.data), LiteTensor(LiteLayout([2, 4], "int32"))
    for length in (0, 31, 64):
        with pytest.raises(LiteArgumentError, match="32, the tensor's size in bytes"):
            tensor.set_data_by_copy(pointer, length)
    tensor.set_data_by_copy(pointer, layout=LiteLayout([4], "int16"))
    assert tensor.to_numpy().tolist() == [0, 0, 1, 0]
    with pytest.raises(LiteArgumentError, match="null"):
        tensor.set_data_by_copy(ctypes.c_void_p(), 8)


def test_copying_is_for_contiguous_host_memory():
    with pytest.raises(LiteArgumentError, match="contiguous"):
        filled().slice([0, 2], [4, 4]).set_data_by_copy(np.ones((4, 2), "int32"))


def test_set_data_by_share_copies_nothing():
    array = values((2, 16), "int8")
    tensor = LiteTensor(LiteLayout([2, 16], "int8"))
    tensor.set_data_by_share(array)
    assert address(tensor) == array.ctypes.data
    array[0, 0] = 9
    assert tensor.to_numpy()[0, 0] == 9
    other = np.ones((3, 5), "float32")
    tensor.set_data_by_share(other)
    assert tensor.layout == LiteLayout([3, 5], "float32")
    tensor.set_data_by_share(ctypes.c_void_p(array.ctypes.data), layout=LiteLayout([32], "int8"))
    assert address(tensor) == array.ctypes.data
    with pytest.raises(LiteArgumentError, match="contiguous"):
        tensor.set_data_by_share(other.T)


def test_get_data_by_share_is_the_memory():
    tensor = filled((4, 32), "int16")
    view = tensor.get_data_by_share()
    assert np.array_equal(view, values((4, 32), "int16"))
    tensor.fill_zero()
    assert not view.any()
    view[1, 2] = 5
    assert tensor.to_numpy()[1, 2] == 5


def test_the_view_outlives_its_tensor():
    tensor = filled()
    view = tensor.get_data_by_share()
    tensor.set_data_by_copy(np.zeros((100, 100), "float32"))  # gets other memory
    assert np.array_equal(view, values())
    del tensor
    gc.collect()
    assert np.array_equal(view, values())


def test_the_view_outlives_its_network(layer, rng):
    network = loaded(layer)
    result = run(network, rng.standard_normal((4, 8)).astype("float32"))
    view = network.get_io_tensor("result_0").get_data_by_share()
    del network
    gc.collect()
    others = [LiteTensor(LiteLayout([4, 4])) for _ in range(50)]
    for other in others:
        other.fill_zero()
    assert np.array_equal(view, result)


def test_to_numpy_copies():
    tensor = filled()
    copy = tensor.to_numpy()
    tensor.fill_zero()
    assert np.array_equal(copy, values())
    assert np.array_equal(filled().slice([1, 4], [3, 8]).to_numpy(), values()[1:3, 4:8])
    assert LiteTensor().to_numpy().size == 0


def test_tensors_are_given_back():
    """32 MiB again and again: the library keeps some memory for the next tensors, but no more with each round."""

    def use(rounds):
        for _ in range(rounds):
            tensors = [LiteTensor(LiteLayout([1024, 1024], "float32")) for _ in range(8)]
            for tensor in tensors:
                tensor.fill_zero()
            tensors.clear()

    before = 0
    for _ in range(10):
        use(1)
        before = max(before, resident())  # what is kept differs from round to round
    use(20)
    assert resident() - before < 2**26
