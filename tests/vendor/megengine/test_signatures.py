"""The documented calls have the documented parameters and defaults."""

import inspect

import pytest

from dlinfer.vendor.megengine import lite

DOCUMENTED = {
    "LiteLayout": "shape=None, dtype=None",
    "LiteTensor": "layout=None, device_type=LITE_CPU, device_id=0, is_pinned_host=False, shapes=None, dtype=None",
    "LiteTensor.reshape": "shape",
    "LiteTensor.slice": "start, end, step=None",
    "LiteTensor.fill_zero": "",
    "LiteTensor.copy_from": "src_tensor",
    "LiteTensor.share_memory_with": "src_tensor",
    "LiteTensor.update": "",
    "LiteTensor.get_ctypes_memory": "",
    "LiteTensor.set_data_by_copy": "data, data_length=0, layout=None",
    "LiteTensor.set_data_by_share": "data, length=0, layout=None",
    "LiteTensor.get_data_by_share": "",
    "LiteTensor.to_numpy": "",
    "LiteNetworkIO": "inputs=None, outputs=None",
    "LiteNetwork": "config=None, io=None",
    "LiteNetwork.load": "path",
    "LiteNetwork.forward": "",
    "LiteNetwork.wait": "",
    "LiteNetwork.get_input_name": "index",
    "LiteNetwork.get_output_name": "index",
    "LiteNetwork.get_all_input_name": "",
    "LiteNetwork.get_all_output_name": "",
    "LiteNetwork.get_static_memory_alloc_info": "log_dir='logs/test'",
    "LiteNetwork.is_cpu_inplace_mode": "",
    "LiteNetwork.enable_cpu_inplace_mode": "",
    "LiteNetwork.use_tensorrt": "",
    "LiteNetwork.get_io_tensor": "name, phase=LITE_IO",
    "LiteNetwork.share_weights_with": "src_network",
    "LiteNetwork.share_runtime_memroy": "src_network",
    "LiteNetwork.async_with_callback": "async_callback",
    "LiteNetwork.set_start_callback": "start_callback",
    "LiteNetwork.set_finish_callback": "finish_callback",
    "LiteNetwork.enable_profile_performance": "profile_file",
    "LiteNetwork.set_network_algo_workspace_limit": "size_limit",
    "LiteNetwork.set_network_algo_policy": "policy, shared_batch_size=0, binary_equal_between_batch=False",
    "LiteNetwork.io_txt_dump": "txt_file",
    "LiteNetwork.io_bin_dump": "bin_dir",
    "LiteGlobal.register_decryption_and_key": "decryption_name, decryption_func, key",
    "LiteGlobal.update_decryption_key": "decryption_name, key",
    "LiteGlobal.set_loader_lib_path": "path",
    "LiteGlobal.set_persistent_cache": "path, always_sync=False",
    "LiteGlobal.dump_persistent_cache": "path",
    "LiteGlobal.get_device_count": "device_type",
    "LiteGlobal.try_coalesce_all_free_memory": "",
    "LiteGlobal.set_tensorrt_cache": "path",
    "LiteGlobal.dump_tensorrt_cache": "",
    "LiteGlobal.register_memory_pair": "vir_ptr, phy_ptr, length, device, backend=LITE_DEFAULT",
    "LiteGlobal.clear_memory_pair": "vir_ptr, phy_ptr, device, backend=LITE_DEFAULT",
    "LiteGlobal.lookup_physic_ptr": "vir_ptr, device, backend=LITE_DEFAULT",
    "TensorBatchCollector": "shape, dtype=LITE_INT8, device_type=LITE_CUDA, device_id=0, is_pinned_host=False, "
    "tensor=None",
    "TensorBatchCollector.collect_id": "array, batch_id",
    "TensorBatchCollector.collect_by_ctypes": "data, length",
    "TensorBatchCollector.collect": "array",
    "TensorBatchCollector.free": "indexes",
    "TensorBatchCollector.get": "",
    "TensorBatchCollector.to_numpy": "",
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_parameters(name):
    owner, _, method = name.partition(".")
    found = getattr(lite, owner)
    function = getattr(found, method) if method else found.__init__
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        default = getattr(parameter.default, "name", None) or repr(parameter.default)
        shown.append(
            parameter.name if parameter.default is parameter.empty else f"{parameter.name}={default}"
        )
    assert ", ".join(one for one in shown if one != "self") == DOCUMENTED[name]


def test_properties_that_can_be_set():
    for owner, name, settable in (
        (lite.LiteTensor, "layout", True),
        (lite.LiteTensor, "is_pinned_host", False),
        (lite.LiteTensor, "device_type", False),
        (lite.LiteTensor, "device_id", False),
        (lite.LiteTensor, "is_continue", False),
        (lite.LiteTensor, "nbytes", False),
        (lite.LiteNetwork, "device_id", True),
        (lite.LiteNetwork, "stream_id", True),
        (lite.LiteNetwork, "threads_number", True),
    ):
        found = inspect.getattr_static(owner, name)
        assert isinstance(found, property)
        assert (found.fset is not None) == settable
