"""What the installed MegEngine Lite lacks, shown on its C library alone: no code of dlinfer's takes part.

Usage: python lacking.py LIBRARY MODEL.mge CONVOLUTION.mge. Prints one JSON object: call -> the library's message, or
null where the call succeeds. Structures and calls are those of the public headers lite-c/*.h of MegEngine 1.13.
"""

import ctypes
import json
import sys
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p


class Options(ctypes.Structure):
    names = (
        "weight_preprocess fuse_preprocess fake_next_exec var_sanity_check_first_run const_shape force_dynamic_alloc "
        "force_output_dynamic_alloc force_output_use_user_specified_memory no_profiling_on_shape_change jit_level "
        "comp_node_seq_record_level graph_opt_level async_exec_level enable_nchw44 enable_nchw44_dot enable_nchw88 "
        "enable_nhwcd4 enable_nchw4 enable_nchw32 enable_nchw64"
    ).split()
    _fields_ = [(name, c_int) for name in names]


class Config(ctypes.Structure):
    _fields_ = [
        ("has_compression", c_int),
        ("device_id", c_int),
        ("device_type", c_int),
        ("backend", c_int),
        ("bare_model_cryption_name", c_char_p),
        ("options", Options),
        ("auto_optimize_inference", c_int),
        ("discrete_input_name", c_char_p),
    ]


class NetworkIO(ctypes.Structure):
    _fields_ = [
        ("inputs", c_void_p),
        ("outputs", c_void_p),
        ("input_size", c_size_t),
        ("output_size", c_size_t),
    ]


def main(library_path: str, model: str, convolution: str) -> None:
    lite = ctypes.CDLL(library_path)
    lite.LITE_get_last_error.restype = c_char_p
    lite.default_config.restype = POINTER(Config)
    answers: dict[str, str | None] = {}

    def message(status: int) -> str | None:
        return lite.LITE_get_last_error().decode(errors="replace")[:200] if status else None

    def network(path: str, **options: int) -> tuple[c_void_p, int]:
        config = Config.from_buffer_copy(lite.default_config().contents)
        for name, value in options.items():
            setattr(config.options, name, value)
        made = c_void_p()
        assert lite.LITE_make_network(ctypes.byref(made), config, NetworkIO()) == 0
        return made, lite.LITE_load_model_from_path(made, path.encode())

    plain, status = network(model)
    assert status == 0
    answers["get_static_memory_alloc_info"] = message(lite.LITE_get_static_memory_alloc_info(plain, b"/tmp"))
    for options in ({"jit_level": 1}, {"jit_level": 2}, {"graph_opt_level": 3}):
        name, value = next(iter(options.items()))
        answers[f"{name}={value}"] = message(network(model, **options)[1])
    blocked, status = network(convolution, enable_nhwcd4=1)
    assert status == 0
    for name in (b"data", b"weight"):
        tensor = c_void_p()
        assert lite.LITE_get_io_tensor(blocked, name, 0, ctypes.byref(tensor)) == 0
        assert lite.LITE_tensor_fill_zero(tensor) == 0
    answers["enable_nhwcd4=1"] = message(lite.LITE_forward(blocked))
    virtual, physical, found = c_void_p(0x1000), c_void_p(0x2000), c_void_p()
    answers["register_memory_pair"] = message(
        lite.LITE_register_memory_pair(virtual, physical, c_size_t(64), 0, 0)
    )
    answers["clear_memory_pair"] = message(lite.LITE_clear_memory_pair(virtual, physical, 0, 0))
    answers["lookup_physic_ptr"] = message(lite.LITE_lookup_physic_ptr(virtual, ctypes.byref(found), 0, 0))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
