"""Arguments that Lite does not take are refused by name, in our own class, before they reach the library."""

import ctypes
from typing import Any

import numpy as np
import pytest

from dlinfer.vendor.megengine.errors import LiteArgumentError, LiteError
from dlinfer.vendor.megengine.lite import (
    LiteGlobal,
    LiteIO,
    LiteLayout,
    LiteNetwork,
    LiteNetworkIO,
    LiteTensor,
    TensorBatchCollector,
)
from tests.vendor.megengine.running import check, loaded

WRONG: Any = object()


def test_arguments_of_another_kind_are_refused_by_name(layer, rng, tmp_path):
    network = loaded(layer)
    tensor = LiteTensor(LiteLayout([4], "float32"))
    batch = TensorBatchCollector([2, 3], "int32", 0)
    pointer = ctypes.c_void_p(1)
    (tmp_path / "file").write_bytes(b"")
    junk = LiteNetworkIO()
    junk.inputs.append(WRONG)
    calls = {
        "io_type": lambda: LiteIO("data", io_type=9),
        "phase": lambda: network.get_io_tensor("data", 9),
        "name": lambda: network.get_io_tensor(WRONG),
        "decryption_name": lambda: LiteGlobal.update_decryption_key(WRONG, bytes(32)),
        "key": lambda: LiteGlobal.update_decryption_key("AES_default", WRONG),
        "device_id": lambda: setattr(network, "device_id", "x"),
        "stream_id": lambda: setattr(network, "stream_id", -1),
        "nr_threads": lambda: setattr(network, "threads_number", 10**6),
        "index": lambda: network.get_input_name(WRONG),
        "size_limit": lambda: network.set_network_algo_workspace_limit(-1),
        "load: argument path": lambda: LiteNetwork().load(WRONG),
        "config": lambda: LiteNetwork(WRONG),
        "io": lambda: LiteNetwork(io=WRONG),
        "inputs, outputs": lambda: LiteNetwork(io=junk),
        "src_network": lambda: network.share_weights_with(WRONG),
        "path: expected a path": lambda: LiteGlobal.set_persistent_cache(WRONG),
        "path: expected a file": lambda: LiteGlobal.set_loader_lib_path(tmp_path),
        "path: expected a folder": lambda: network.io_bin_dump(tmp_path / "file"),
        "length": lambda: LiteGlobal.register_memory_pair(pointer, pointer, WRONG, 0),
        "backend": lambda: LiteGlobal.clear_memory_pair(pointer, pointer, 0, 7),
        "argument device_id": lambda: LiteTensor(LiteLayout([1]), device_id=WRONG),
        "layout": lambda: LiteTensor(WRONG),
        "shape": lambda: tensor.reshape(WRONG),
        "shape: ": lambda: setattr(tensor, "layout", 5),
        "start": lambda: tensor.slice(WRONG, [1]),
        "end": lambda: tensor.slice([0], [WRONG]),
        "set_data_by_copy: argument layout": lambda: tensor.set_data_by_copy([1.0], layout=WRONG),
        "set_data_by_share: argument layout": lambda: tensor.set_data_by_share(
            np.ones(4, "f4"), layout=WRONG
        ),
        "src_tensor": lambda: tensor.copy_from(WRONG),
        "batch_id": lambda: batch.collect_id(np.ones(3, "int32"), WRONG),
        "indexes": lambda: batch.free(WRONG),
        "argument indexes": lambda: batch.free(["a"]),  # pyright: ignore[reportArgumentType]
    }
    for argument, call in calls.items():
        with pytest.raises(LiteArgumentError, match=argument):
            call()
    check(network, rng)


def test_numbers_of_numpy_are_numbers():
    batch = TensorBatchCollector([2, 3], "int32", 0)
    place: Any = np.int64(1)
    batch.collect_id(np.ones(3, "int32"), place)
    assert batch.to_numpy()[1].tolist() == [1, 1, 1]


def test_a_type_of_elements_that_the_document_does_not_have():
    layout = LiteLayout([2])
    layout.data_type = 99
    for call in (lambda: layout.dtype, lambda: LiteTensor(layout), lambda: LiteIO("data", layout=layout)):
        with pytest.raises(LiteError, match="data_type 99"):
            call()


@pytest.mark.parametrize(
    ("values", "dtype"), [([70000.0], "float16"), ([2**24 + 1], "float32"), ([2049], "float16")]
)
def test_numbers_of_a_list_that_a_tensor_cannot_hold_are_refused(values, dtype):
    tensor = LiteTensor(LiteLayout([1], dtype))
    tensor.fill_zero()
    with pytest.raises(LiteArgumentError, match="values that fit into float"):
        tensor.set_data_by_copy(values)
    assert tensor.to_numpy()[0] == 0
    tensor.set_data_by_copy([0.1])
    assert tensor.to_numpy()[0] == np.dtype(dtype).type(0.1)


def test_a_length_that_does_not_fit_changes_nothing():
    tensor = LiteTensor(LiteLayout([4], "float32"))
    data = np.zeros(8, "float32")
    with pytest.raises(LiteArgumentError, match="length"):
        tensor.set_data_by_copy(ctypes.c_void_p(data.ctypes.data), 5, LiteLayout([8], "float32"))
    assert list(tensor.layout.shapes)[:1] == [4]
