"""The structures of BMRuntime's C interface on 64-bit Linux, by its public manual and headers.

bm_tensor_t, bm_net_info_t, bm_stage_info_t and the functions: the BMRuntime manual of sophgo/libsophon.
The order of fields, and bm_runtime_flag_t: libsophon's header bmdef.h. bm_mem_desc_t: bmlib's manual.
"""

import ctypes
from ctypes import POINTER

MAX_DIMS = 8


class DeviceMemory(ctypes.Structure):
    """bm_device_mem_t: address and size in bytes of device memory."""

    _fields_ = (
        ("address", ctypes.c_ulong),
        ("reserved", ctypes.c_uint),
        ("dmabuf_fd", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("size", ctypes.c_uint),
    )


class LargeMemory(ctypes.Structure):
    """bm_device_mem_u64_t: address and 64-bit size of device memory."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("reserved", ctypes.c_uint),
        ("dmabuf_fd", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("size", ctypes.c_uint64),
    )


class Shape(ctypes.Structure):
    """bm_shape_t."""

    _fields_ = (("num_dims", ctypes.c_int), ("dims", ctypes.c_int * MAX_DIMS))

    @classmethod
    def of(cls, sizes: list[int]) -> "Shape":
        """Return the structure for a shape of at most MAX_DIMS sizes."""
        return cls(len(sizes), (ctypes.c_int * MAX_DIMS)(*sizes))

    def sizes(self) -> list[int]:
        return list(self.dims[: self.num_dims])


class Tensor(ctypes.Structure):
    """bm_tensor_t."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("shape", Shape),
        ("memory", DeviceMemory),
        ("store_mode", ctypes.c_int),
    )


class Stage(ctypes.Structure):
    """bm_stage_info_t: the shapes of one stage, and the runtime's memory for its inputs and outputs."""

    _fields_ = (
        ("input_shapes", POINTER(Shape)),
        ("output_shapes", POINTER(Shape)),
        ("input_memories", POINTER(DeviceMemory)),
        ("output_memories", POINTER(DeviceMemory)),
    )


class Network(ctypes.Structure):
    """bm_net_info_t."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("is_dynamic", ctypes.c_bool),
        ("input_num", ctypes.c_int),
        ("input_names", POINTER(ctypes.c_char_p)),
        ("input_dtypes", POINTER(ctypes.c_int)),
        ("input_scales", POINTER(ctypes.c_float)),
        ("output_num", ctypes.c_int),
        ("output_names", POINTER(ctypes.c_char_p)),
        ("output_dtypes", POINTER(ctypes.c_int)),
        ("output_scales", POINTER(ctypes.c_float)),
        ("stage_num", ctypes.c_int),
        ("stages", POINTER(Stage)),
        ("max_input_bytes", POINTER(ctypes.c_size_t)),
        ("max_output_bytes", POINTER(ctypes.c_size_t)),
        ("input_zero_points", POINTER(ctypes.c_int)),
        ("output_zero_points", POINTER(ctypes.c_int)),
        ("input_devices", POINTER(ctypes.c_int)),
        ("output_devices", POINTER(ctypes.c_int)),
        ("core_num", ctypes.c_int),
        ("addr_mode", ctypes.c_int32),
    )
