"""On the raw C library: bm_memcpy_d2d_byte ends the process on bm1688's emulator, and does its work on bm1684x's.

python copy_on_bm1688.py FOLDER BMODEL, with a folder of an emulator (the cache folder's sophgo/emulators/<chip>) and a
bmodel of that chip, which is loaded before the copy. Standard library and ctypes only.
"""

import ctypes
import sys
from ctypes import byref, c_bool, c_char_p, c_int, c_size_t, c_uint, c_ulong, c_void_p


class Memory(ctypes.Structure):
    _fields_ = (("a", c_ulong), ("r", c_uint), ("f", c_int), ("g", c_uint), ("size", c_uint))


def main(folder: str, bmodel: str) -> None:
    bmlib = ctypes.CDLL(f"{folder}/libbmlib.so.0", ctypes.RTLD_GLOBAL)
    bmrt = ctypes.CDLL(f"{folder}/libbmrt.so.1.0", ctypes.RTLD_GLOBAL)
    bmlib.bm_malloc_device_byte.argtypes = (c_void_p, ctypes.POINTER(Memory), c_uint)
    bmlib.bm_memcpy_s2d_partial.argtypes = (c_void_p, Memory, c_char_p, c_uint)
    bmlib.bm_memcpy_d2s_partial.argtypes = (c_void_p, c_char_p, Memory, c_uint)
    bmlib.bm_memcpy_d2d_byte.argtypes = (c_void_p, Memory, c_size_t, Memory, c_size_t, c_size_t)
    bmlib.bm_free_device.argtypes = (c_void_p, Memory)
    bmlib.bm_dev_free.argtypes = bmrt.bmrt_destroy.argtypes = (c_void_p,)
    bmrt.bmrt_create.argtypes, bmrt.bmrt_create.restype = (c_void_p,), c_void_p
    bmrt.bmrt_load_bmodel.argtypes, bmrt.bmrt_load_bmodel.restype = (c_void_p, c_char_p), c_bool
    handle = c_void_p()
    assert bmlib.bm_dev_request(byref(handle), 0) == 0
    runtime = bmrt.bmrt_create(handle)
    assert bmrt.bmrt_load_bmodel(runtime, bmodel.encode())
    source, target = Memory(), Memory()
    for memory in (source, target):
        assert bmlib.bm_malloc_device_byte(handle, byref(memory), 64) == 0
    data, back = bytes(range(64)), ctypes.create_string_buffer(64)
    assert bmlib.bm_memcpy_s2d_partial(handle, source, data, 64) == 0
    print("copying", flush=True)
    assert bmlib.bm_memcpy_d2d_byte(handle, target, 0, source, 0, 64) == 0
    assert bmlib.bm_memcpy_d2s_partial(handle, back, target, 64) == 0
    print("copied", back.raw == data, flush=True)
    for memory in (source, target):
        bmlib.bm_free_device(handle, memory)
    bmrt.bmrt_destroy(runtime)
    bmlib.bm_dev_free(handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
