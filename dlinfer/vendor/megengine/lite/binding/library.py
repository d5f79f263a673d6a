"""MegEngine Lite's C library from the toolchain's environment: loaded at its first use, with each result checked.

The names, types and order of arguments follow the public headers of MegEngine 1.13 (lite-c/global_c.h, network_c.h,
tensor_c.h).
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

# Names of functions -> types of their arguments.
# None: an argument is a structure by value; another module declares its type.
_CALLS: dict[str, list[Any] | None] = {
    "get_device_count": [c_int, _SIZE_OUT],
    "try_coalesce_all_free_memory dump_tensor_rt_cache": [],
    "register_decryption_and_key": [_STRING, Decryption, POINTER(c_uint8), c_size_t],
    "update_decryption_or_key": [_STRING, c_void_p, POINTER(c_uint8), c_size_t],
    "set_loader_lib_path dump_persistent_cache set_tensor_rt_cache": [_STRING],
    "set_persistent_cache": [_STRING, c_int],
    "set_log_level": [c_int],
    "get_log_level": [_INT_OUT],
    "register_memory_pair": [c_void_p, c_void_p, c_size_t, c_int, c_int],
    "clear_memory_pair": [c_void_p, c_void_p, c_int, c_int],
    "lookup_physic_ptr": [c_void_p, _HANDLE_OUT, c_int, c_int],
    # Tensors.
    "make_tensor set_tensor_layout get_tensor_layout": None,
    "destroy_tensor tensor_fill_zero": [c_void_p],
    "tensor_copy tensor_share_memory_with": [c_void_p, c_void_p],
    "get_tensor_device_type get_tensor_device_id is_pinned_host is_memory_continue": [c_void_p, _INT_OUT],
    "get_tensor_total_size_in_byte": [c_void_p, _SIZE_OUT],
    "get_tensor_memory": [c_void_p, _HANDLE_OUT],
    "reset_tensor_memory": [c_void_p, c_void_p, c_size_t],
    "tensor_reshape": [c_void_p, POINTER(c_int), c_int],
    "tensor_slice": [c_void_p, *[POINTER(c_size_t)] * 3, c_size_t, _HANDLE_OUT],
    # Networks.
    "make_network": None,
    "destroy_network forward wait set_cpu_inplace_mode use_tensorrt": [c_void_p],
    "load_model_from_mem": [c_void_p, c_void_p, c_size_t],
    "shared_weight_with_network share_runtime_memroy": [c_void_p, c_void_p],
    "get_io_tensor": [c_void_p, _STRING, c_int, _HANDLE_OUT],
    "get_input_name get_output_name": [c_void_p, c_size_t, POINTER(_STRING)],
    "get_all_input_name get_all_output_name": [c_void_p, _SIZE_OUT, POINTER(_STRING)],
    "is_cpu_inplace_mode get_device_id get_stream_id": [c_void_p, _INT_OUT],
    "get_cpu_threads_number": [c_void_p, _SIZE_OUT],
    "set_cpu_threads_number set_network_algo_workspace_limit": [c_void_p, c_size_t],
    "set_device_id set_stream_id set_network_algo_policy": [c_void_p, c_int],
    "set_network_algo_fastrun_config": [c_void_p, c_uint, c_int],
    "set_async_callback": [c_void_p, AsyncCallback],
    "set_start_callback set_finish_callback": [c_void_p, IoCallback],
    "enable_profile_performance enable_io_txt_dump enable_io_bin_dump": [c_void_p, _STRING],
    "get_static_memory_alloc_info": [c_void_p, _STRING],
}
_ARGUMENTS: dict[str, Any] = {
    name: arguments for names, arguments in _CALLS.items() for name in names.split()
}

_FLOAT_STATE = 64
"""A number of bytes that is enough for C's fenv_t on every Linux.

When the library loads a model, it makes the calling thread flush subnormal numbers to zero, in torch and numpy too. To
undo this, each call of the library saves the floating-point state before and restores it afterwards.
"""

_USUAL_STATE = ctypes.c_void_p(-1)
"""C's FE_DFL_ENV, the default floating-point state."""

_LACKING = re.compile(
    r"not implement yet|disabled? at compile time|Please check macro|No compiler support", re.IGNORECASE
)

_DOUBT = " (another thread's call failed at the same time; the message may be about that one)"


class Library:
    """The loaded library. ``library.call("forward", handle)`` calls ``LITE_forward(handle)`` and checks its result."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)  # calls release the GIL
        self._process = ctypes.CDLL(None)
        self._caller = threading.local()
        self._failures = Failures(_last_message(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, f"LITE_{name}")
            function.restype = c_int
            if arguments is not None:
                function.argtypes = arguments

    def call(self, name: str, *arguments: Any, said: str | None = None) -> None:
        """Call the library's function LITE_``name``. said: the function's name in errors; None means ``name``.

        Raises LiteLackError if the library's message says that this build lacks the function.
        Raises LiteError with the library's message for any other failure.
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

    def ask(self, name: str, *arguments: Any, said: str | None = None) -> Any:
        """Call a function that writes its answer to its last argument, a pointer. Return the answer.

        The caller passes all arguments but the pointer. Raises as ``call`` does.
        """
        answer = _ARGUMENTS[name][-1]._type_()
        self.call(name, *arguments, ctypes.byref(answer), said=said)
        return answer.value

    @contextlib.contextmanager
    def callers_numbers(self) -> Iterator[None]:
        """Run a callback with the floating-point state that its thread had before it called the library.

        A callback in one of the library's own threads gets C's default state.
        """
        before = ctypes.create_string_buffer(_FLOAT_STATE)
        self._process.fegetenv(before)
        self._process.fesetenv(self._state() or _USUAL_STATE)
        try:
            yield
        finally:
            self._process.fesetenv(before)

    def _state(self) -> Any:
        """Return this thread's floating-point state before its call of the library; None outside of calls."""
        return getattr(self._caller, "state", None)


_loading = threading.RLock()


def library() -> Library:
    """Return the toolchain's library; the first call loads it. Raises ToolchainMissingError and LiteError."""
    with _loading:  # all threads share one object, since it must see all calls
        return _loaded()


@lru_cache(maxsize=1)
def _loaded() -> Library:
    folder = find(TOOLCHAIN).site_packages / "megenginelite" / "libs"
    files = sorted(folder.glob("liblite_shared*.so"))
    if len(files) != 1:
        raise LiteError(call="loading the library", detail=f"{folder} has {len(files)} libraries, not one")
    try:
        return Library(str(files[0]))
    except OSError as error:
        raise LiteError(call="loading the library", detail=str(error)) from error


def _last_message(path: str) -> Callable[[], str]:
    """Return a function that returns the library's last message and clears it.

    That function keeps the GIL, so no other Python thread calls the library between the two steps.
    """
    with_gil = ctypes.PyDLL(path)
    with_gil.LITE_get_last_error.restype = c_char_p

    def take() -> str:
        message = with_gil.LITE_get_last_error() or b""
        with_gil.LITE_clear_last_error()
        return message.decode(errors="replace")

    return take


def explain(text: str) -> str:
    """Return the library's message without its backtrace and source lines."""
    text = text.partition("backtrace:")[0]
    _, extra, rest = text.partition("extra message:")
    text = rest if extra and rest.strip() else text
    text = re.sub(r",? ?Error Code: -?\d+", "", text).strip()
    text = text.removeprefix("Error:").strip().rstrip(".").strip()
    return " ".join(text.split())[:500] or "the library gives no reason"
