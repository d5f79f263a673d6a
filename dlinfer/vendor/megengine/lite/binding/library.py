"""MegEngine Lite's C library: found in the toolchain's environment, loaded at the first call, each call checked.

Names, types and order of arguments are those of its public headers (lite-c/global_c.h, network_c.h, tensor_c.h of
MegEngine 1.13).
"""

import contextlib
import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_void_p
from functools import lru_cache
from typing import Any

from dlinfer.toolchain import find
from dlinfer.vendor.megengine.errors import LiteError, LiteLackError
from dlinfer.vendor.megengine.lite.binding.failures import Failures
from dlinfer.vendor.megengine.toolchain import TOOLCHAIN

Decryption = ctypes.CFUNCTYPE(c_size_t, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)
AsyncCallback = ctypes.CFUNCTYPE(c_int)
IoCallback = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_size_t)

_STRING, _SIZE_OUT, _INT_OUT, _HANDLE_OUT = c_char_p, POINTER(c_size_t), POINTER(c_int), POINTER(c_void_p)

# None: takes a structure by value, whose type a module above this one declares.
_CALLS: dict[str, list[Any] | None] = {
    "get_device_count": [c_int, _SIZE_OUT],
    "try_coalesce_all_free_memory": [],
    "register_decryption_and_key": [_STRING, Decryption, POINTER(c_uint8), c_size_t],
    "update_decryption_or_key": [_STRING, c_void_p, POINTER(c_uint8), c_size_t],
    "set_loader_lib_path": [_STRING],
    "set_persistent_cache": [_STRING, c_int],
    "dump_persistent_cache": [_STRING],
    "set_tensor_rt_cache": [_STRING],
    "dump_tensor_rt_cache": [],
    "set_log_level": [c_int],
    "get_log_level": [_INT_OUT],
    "register_memory_pair": [c_void_p, c_void_p, c_size_t, c_int, c_int],
    "clear_memory_pair": [c_void_p, c_void_p, c_int, c_int],
    "lookup_physic_ptr": [c_void_p, _HANDLE_OUT, c_int, c_int],
    "make_tensor": None,
    "destroy_tensor": [c_void_p],
    "set_tensor_layout": None,
    "get_tensor_layout": None,
    "reset_tensor_memory": [c_void_p, c_void_p, c_size_t],
    "tensor_reshape": [c_void_p, POINTER(c_int), c_int],
    "tensor_slice": [
        c_void_p,
        POINTER(c_size_t),
        POINTER(c_size_t),
        POINTER(c_size_t),
        c_size_t,
        _HANDLE_OUT,
    ],
    "tensor_fill_zero": [c_void_p],
    "tensor_copy": [c_void_p, c_void_p],
    "tensor_share_memory_with": [c_void_p, c_void_p],
    "get_tensor_memory": [c_void_p, _HANDLE_OUT],
    "get_tensor_total_size_in_byte": [c_void_p, _SIZE_OUT],
    "get_tensor_device_type": [c_void_p, _INT_OUT],
    "get_tensor_device_id": [c_void_p, _INT_OUT],
    "is_pinned_host": [c_void_p, _INT_OUT],
    "is_memory_continue": [c_void_p, _INT_OUT],
    "make_network": None,
    "destroy_network": [c_void_p],
    "load_model_from_mem": [c_void_p, c_void_p, c_size_t],
    "shared_weight_with_network": [c_void_p, c_void_p],
    "share_runtime_memroy": [c_void_p, c_void_p],
    "forward": [c_void_p],
    "wait": [c_void_p],
    "get_io_tensor": [c_void_p, _STRING, c_int, _HANDLE_OUT],
    "get_input_name": [c_void_p, c_size_t, POINTER(_STRING)],
    "get_output_name": [c_void_p, c_size_t, POINTER(_STRING)],
    "get_all_input_name": [c_void_p, _SIZE_OUT, POINTER(_STRING)],
    "get_all_output_name": [c_void_p, _SIZE_OUT, POINTER(_STRING)],
    "is_cpu_inplace_mode": [c_void_p, _INT_OUT],
    "set_cpu_inplace_mode": [c_void_p],
    "get_cpu_threads_number": [c_void_p, _SIZE_OUT],
    "set_cpu_threads_number": [c_void_p, c_size_t],
    "get_device_id": [c_void_p, _INT_OUT],
    "set_device_id": [c_void_p, c_int],
    "get_stream_id": [c_void_p, _INT_OUT],
    "set_stream_id": [c_void_p, c_int],
    "use_tensorrt": [c_void_p],
    "set_network_algo_policy": [c_void_p, c_int],
    "set_network_algo_fastrun_config": [c_void_p, c_uint, c_int],
    "set_network_algo_workspace_limit": [c_void_p, c_size_t],
    "set_async_callback": [c_void_p, AsyncCallback],
    "set_start_callback": [c_void_p, IoCallback],
    "set_finish_callback": [c_void_p, IoCallback],
    "enable_profile_performance": [c_void_p, _STRING],
    "enable_io_txt_dump": [c_void_p, _STRING],
    "enable_io_bin_dump": [c_void_p, _STRING],
    "get_static_memory_alloc_info": [c_void_p, _STRING],
}

_FLOAT_STATE = 64
"""Bytes that hold C's fenv_t on every Linux. Loading a model leaves the calling thread flushing subnormal numbers to
zero, for torch and numpy as well; so each call gives back the state that it found."""

_USUAL_STATE = ctypes.c_void_p(-1)
"""C's FE_DFL_ENV."""

_LACKING = re.compile(
    r"not implement yet|disabled? at compile time|Please check macro|No compiler support", re.IGNORECASE
)

_DOUBT = " (another thread's call failed at once, and the library keeps one message: it may be that one's)"


class Library:
    """The loaded library: ``library.call("forward", handle)`` is ``LITE_forward(handle)``, checked."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)  # calls release the GIL
        self._process = ctypes.CDLL(None)
        self._caller = threading.local()
        self._failures = Failures(_last_message(path))
        for name, arguments in _CALLS.items():
            function = getattr(self._library, f"LITE_{name}")
            function.restype = c_int
            if arguments is not None:
                function.argtypes = arguments

    def call(self, name: str, *arguments: Any, said: str | None = None) -> None:
        """Call a function; ``said`` is the name that the user knows it by.

        Raises LiteError with the library's message, LiteLackError where that says that the build has no such thing.
        """
        outer, before = self._state(), ctypes.create_string_buffer(_FLOAT_STATE)
        self._process.fegetenv(before)
        self._caller.state = before
        try:
            with self._failures.watching() as call:
                call.failed = getattr(self._library, f"LITE_{name}")(*arguments) != 0
        finally:
            self._process.fesetenv(before)
            self._caller.state = outer
        if call.failed:
            detail = explain(call.message)
            kind = LiteLackError if _LACKING.search(detail) else LiteError
            raise kind(call=said or name, detail=detail + (_DOUBT if call.doubtful else ""))

    @contextlib.contextmanager
    def callers_numbers(self) -> Iterator[None]:
        """Around Python that the library calls: the caller's floating-point state, in its own threads the usual."""
        before = ctypes.create_string_buffer(_FLOAT_STATE)
        self._process.fegetenv(before)
        self._process.fesetenv(self._state() or _USUAL_STATE)
        try:
            yield
        finally:
            self._process.fesetenv(before)

    def _state(self) -> Any:
        """That of the call of the library that this thread is in."""
        return getattr(self._caller, "state", None)


_loading = threading.RLock()


def library() -> Library:
    """Return the library of the toolchain. Raises ToolchainMissingError, and LiteError where it cannot be loaded."""
    with _loading:  # one for all threads: each knows only of the calls that go through it
        return _loaded()


@lru_cache(maxsize=1)
def _loaded() -> Library:
    folder = find(TOOLCHAIN).site_packages / "megenginelite" / "libs"
    found = sorted(folder.glob("liblite_shared*.so"))
    if len(found) != 1:
        raise LiteError(call="loading the library", detail=f"{folder} has {len(found)} libraries, not one")
    try:
        return Library(str(found[0]))
    except OSError as error:
        raise LiteError(call="loading the library", detail=str(error)) from error


def _last_message(path: str) -> Callable[[], str]:
    """What the library said last, which it then forgets. Nobody else's Python runs in between: the GIL is kept."""
    keeping = ctypes.PyDLL(path)
    keeping.LITE_get_last_error.restype = c_char_p

    def taken() -> str:
        message = keeping.LITE_get_last_error() or b""
        keeping.LITE_clear_last_error()
        return message.decode(errors="replace")

    return taken


def explain(text: str) -> str:
    """Return the library's message without backtrace and source lines of its own."""
    text = text.partition("backtrace:")[0]
    _, extra, rest = text.partition("extra message:")
    text = rest if extra and rest.strip() else text
    text = re.sub(r",? ?Error Code: -?\d+", "", text).strip()
    text = text.removeprefix("Error:").strip().rstrip(".").strip()
    return " ".join(text.split())[:500] or "it gives no reason"
