"""The C libraries libbmlib and libbmrt in a folder, and the types of their functions, from the public manuals.

A function returns a bm_status_t (0 is success), a bool or a pointer.
"""

import ctypes
import os
from ctypes import POINTER, c_bool, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from .layout import DeviceMemory, LargeMemory, Network, Tensor
from .working_memory import WorkingMemory

_MEMORY = POINTER(DeviceMemory)
_TENSORS = POINTER(Tensor)

_BMLIB: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bm_dev_getcount": (c_int, (POINTER(c_int),)),
    "bm_dev_request": (c_int, (POINTER(c_void_p), c_int)),
    "bm_dev_free": (None, (c_void_p,)),
    "bm_get_chipid": (c_int, (c_void_p, POINTER(c_uint))),
    "bm_get_sn": (c_int, (c_void_p, c_char_p)),
    "bm_malloc_device_byte": (c_int, (c_void_p, _MEMORY, c_uint)),
    "bm_free_device": (None, (c_void_p, DeviceMemory)),
    "bm_malloc_device_byte_u64": (c_int, (c_void_p, POINTER(LargeMemory), c_uint64)),
    "bm_free_device_u64": (None, (c_void_p, LargeMemory)),
    "bm_memcpy_s2d_partial": (c_int, (c_void_p, DeviceMemory, c_void_p, c_uint)),
    "bm_memcpy_d2s_partial": (c_int, (c_void_p, c_void_p, DeviceMemory, c_uint)),
    "bm_memcpy_d2d_byte": (c_int, (c_void_p, DeviceMemory, c_size_t, DeviceMemory, c_size_t, c_size_t)),
    "bm_memset_device_ext": (c_int, (c_void_p, c_void_p, c_int, DeviceMemory)),
    "bm_thread_sync": (c_int, (c_void_p,)),
}

_BMRT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bmrt_create_ex": (c_void_p, (POINTER(c_void_p), c_int)),
    "bmrt_destroy": (None, (c_void_p,)),
    "bmrt_set_flags": (None, (c_void_p, c_uint)),
    "bmrt_get_flags": (c_uint, (c_void_p,)),
    "bmrt_load_bmodel": (c_bool, (c_void_p, c_char_p)),
    "bmrt_load_bmodel_data": (c_bool, (c_void_p, c_void_p, c_size_t)),
    "bmrt_get_network_number": (c_int, (c_void_p,)),
    "bmrt_get_network_name": (c_char_p, (c_void_p, c_int)),
    "bmrt_get_network_info": (POINTER(Network), (c_void_p, c_char_p)),
    "bmrt_launch_tensor_ex": (c_bool, (c_void_p, c_char_p, _TENSORS, c_int, _TENSORS, c_int, c_bool, c_bool)),
}


def open_libraries(folder: str) -> tuple[Any, Any, WorkingMemory]:
    """Open libbmlib and libbmrt. Return both, and the object that allocates working memory for libbmrt.

    Raises OSError.
    """
    path = os.path.join(folder, "libshim.so")  # emulators only
    shim = ctypes.CDLL(path, ctypes.RTLD_GLOBAL) if os.path.exists(path) else None  # before bmlib
    bmlib = _typed(_open(folder, "libbmlib.so.0", "libbmlib.so"), _BMLIB)
    working = WorkingMemory(bmlib)
    if shim is not None:
        shim.dlinfer_set_functions(bmlib.bm_dev_request, working.allocating, working.releasing)
    return bmlib, _typed(_open(folder, "libbmrt.so.1.0", "libbmrt.so"), _BMRT), working


def _open(folder: str, *names: str) -> ctypes.CDLL:
    """Open the first of the files ``names`` that exists.

    Its symbols are global, because libbmrt uses libbmlib's functions.
    """
    there = [name for name in names if os.path.exists(os.path.join(folder, name))]
    return ctypes.CDLL(os.path.join(folder, (there or names)[0]), ctypes.RTLD_GLOBAL)


def _typed(library: ctypes.CDLL, functions: dict[str, tuple[Any, tuple[Any, ...]]]) -> ctypes.CDLL:
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
