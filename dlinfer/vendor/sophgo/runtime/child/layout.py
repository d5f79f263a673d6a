"""The structures of BMRuntime's C interface on 64-bit Linux, from its public manuals and headers.

bm_tensor_t, bm_net_info_t, bm_stage_info_t and the functions come from the BMRuntime manual of sophgo/libsophon. The
order of fields and bm_runtime_flag_t come from libsophon's header bmdef.h. bm_mem_desc_t comes from bmlib's manual.
"""

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint, c_uint64

MAX_DIMS = 8


_ADDRESS = (("address", c_uint64), ("reserved", c_uint), ("dmabuf_fd", c_int), ("flags", c_uint))


class DeviceMemory(ctypes.Structure):
    """bm_device_mem_t: the address and the size in bytes of device memory."""

    _fields_ = (*_ADDRESS, ("size", c_uint))


class LargeMemory(ctypes.Structure):
    """bm_device_mem_u64_t: the address and the 64-bit size in bytes of device memory."""

    _fields_ = (*_ADDRESS, ("size", c_uint64))


class Shape(ctypes.Structure):
    """bm_shape_t: the sizes of a tensor."""

    _fields_ = (("num_dims", c_int), ("dims", c_int * MAX_DIMS))

    @classmethod
    def of(cls, sizes: list[int]) -> "Shape":
        """Return the structure for a shape, which may have at most MAX_DIMS sizes."""
        return cls(len(sizes), (c_int * MAX_DIMS)(*sizes))

    def sizes(self) -> list[int]:
        return list(self.dims[: self.num_dims])


class Tensor(ctypes.Structure):
    """bm_tensor_t: a tensor in device memory."""

    _fields_ = (("dtype", c_int), ("shape", Shape), ("memory", DeviceMemory), ("store_mode", c_int))


class Stage(ctypes.Structure):
    """bm_stage_info_t: the shapes of inputs and outputs in one stage, and BMRuntime's own memory for them."""

    _fields_ = (
        ("input_shapes", POINTER(Shape)),
        ("output_shapes", POINTER(Shape)),
        ("input_memories", POINTER(DeviceMemory)),
        ("output_memories", POINTER(DeviceMemory)),
    )


class Network(ctypes.Structure):
    """bm_net_info_t: the description of a network."""

    _fields_ = (
        ("name", c_char_p),
        ("is_dynamic", c_bool),
        *(
            (side + field, kind)
            for side in ("input_", "output_")
            for field, kind in (
                ("num", c_int),
                ("names", POINTER(c_char_p)),
                ("dtypes", POINTER(c_int)),
                ("scales", POINTER(c_float)),
            )
        ),
        ("stage_num", c_int),
        ("stages", POINTER(Stage)),
        ("max_input_bytes", POINTER(c_size_t)),
        ("max_output_bytes", POINTER(c_size_t)),
        *(
            (side + field, POINTER(c_int))
            for field in ("zero_points", "devices")
            for side in ("input_", "output_")
        ),
        ("core_num", c_int),
        ("addr_mode", c_int32),
    )
