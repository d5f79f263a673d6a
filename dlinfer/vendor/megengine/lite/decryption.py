"""Decryption of model files by functions that the user registers."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dlinfer.vendor.megengine.errors import LiteCallbackError
from dlinfer.vendor.megengine.lite.binding.checks import function, text, wrong
from dlinfer.vendor.megengine.lite.binding.library import Decryption, library

BUILT_IN_KEYS = {"AES_default": 32, "RC4_default": 16, "SIMPLE_FAST_RC4_default": 16}
"""The size in bytes of the key of each built-in method. The library reads this many bytes, even from a shorter key."""

_registered: dict[str, Any] = {}
"""Registered decryption functions. The library knows them by address, so they are kept until the process ends."""

_thread = threading.local()


class Bytes(np.ndarray):
    """An array of bytes that is false if it is empty: the example in MegEngine's document tests ``if not out_arr``."""

    def __bool__(self) -> bool:
        return self.size > 0


Function = Callable[[Any, Any, Any], int]


class DecryptionFunction:
    """A decryption function that Python and the library can call. The decorator ``decryption_func`` returns it."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        self.native = Decryption(self._called)

    def __call__(self, in_arr: Any, key_arr: Any, out_arr: Any) -> int:
        return self._function(in_arr, key_arr, out_arr)

    def _called(self, data: int, size: int, key: int, key_size: int, out: int | None) -> int:
        """Answer the library's two calls, which both come in one thread.

        The first call has no ``out`` and asks for the decrypted size. The second call asks to fill ``out``, which has
        that size."""
        try:
            source, secret = _bytes(data, size), _bytes(key, key_size)
            if out:
                return int(self._function(source, secret, _bytes(out, _thread.promised)))
            _thread.promised = max(int(self._function(source, secret, None)), 0)
            return _thread.promised
        except BaseException as error:  # noqa: BLE001 - it cannot pass through C; ``watched`` raises it
            _thread.failure = error
            return 0


def decryption_func(function: Function) -> DecryptionFunction:
    """Decorate ``function(in_arr, key_arr, out_arr)``, which decrypts ``in_arr`` by ``key_arr``, two uint8 arrays.

    The function returns the number of decrypted bytes. It is called twice: first with None as ``out_arr``, then with a
    uint8 array of that many bytes, which it fills. The arrays are the library's memory, valid only during the call."""
    return DecryptionFunction(function)


def register_decryption_and_key(
    decryption_name: str, decryption_func: Any, key: Sequence[int] | bytes
) -> None:
    """Register a decryption method and its key under a name, until the process ends.

    Raises LiteArgumentError for a bad argument.
    Raises LiteError for a name that is already registered."""
    call = "register_decryption_and_key"
    method = function(call, "decryption_func", decryption_func)
    if not isinstance(method, DecryptionFunction):
        method = DecryptionFunction(method)
    name, secret = text(call, "decryption_name", decryption_name), _key(call, key)
    library().call(call, name, method.native, secret, len(secret))
    _registered[decryption_name] = method


def update_decryption_key(decryption_name: str, key: Sequence[int] | bytes) -> None:
    """Replace the key of a decryption method. Raises LiteArgumentError, and LiteError for an unknown name."""
    call = "update_decryption_key"
    name, secret = text(call, "decryption_name", decryption_name), _key(call, key)
    size = BUILT_IN_KEYS.get(decryption_name)
    if size is not None and len(secret) != size:
        raise wrong(call, "key", f"{size} bytes for {decryption_name}", f"{len(secret)} bytes")
    library().call("update_decryption_or_key", name, None, secret, len(secret), said=call)


def damage(decryption_name: str, data: memoryview) -> str | None:
    """Return a reason not to decrypt ``data``, if no built-in method could have written it; else None.

    The result is always None for a method that the user registered. The library itself does not check the size of
    ``data``. AES_default writes an initialisation vector of 16 bytes, blocks of 16 bytes, and the model's size in 8
    bytes. The RC4 methods write words of 8 bytes; the last word is a checksum."""
    if decryption_name == "AES_default":
        body = len(data) - 24
        if body < 16 or body % 16:
            return f"it has {len(data)} bytes, which {decryption_name} never writes"
        if int.from_bytes(data[-8:], "big") > body:
            return "the model's size does not match the file"
    elif decryption_name in BUILT_IN_KEYS and (len(data) < 16 or len(data) % 8):
        return f"it has {len(data)} bytes, which {decryption_name} never writes"
    return None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Wrap the loading of a model. Raises LiteCallbackError if a decryption function raises in this thread."""
    _thread.failure = None
    try:
        yield
    finally:
        error, _thread.failure = _thread.failure, None
        if error is not None:
            detail = f"{type(error).__name__}: {error}"
            raise LiteCallbackError(callback="decryption function", detail=detail) from error


def _bytes(address: int, size: int) -> Bytes:
    if not size:
        return np.empty(0, np.uint8).view(Bytes)
    memory = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memoryview(memory), np.uint8).view(Bytes)


def _key(call: str, key: Sequence[int] | bytes) -> Any:
    numbers = list(key) if isinstance(key, Iterable) else []
    if not numbers or not all(isinstance(byte, (int, np.integer)) and 0 <= byte < 256 for byte in numbers):
        raise wrong(call, "key", "bytes, or numbers from 0 to 255, at least one", repr(key))
    return (ctypes.c_uint8 * len(numbers))(*map(int, numbers))
