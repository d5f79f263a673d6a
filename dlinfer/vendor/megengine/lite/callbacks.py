"""A network's callbacks: kept alive as long as the library may call them, and what they raise kept for the caller.

The library knows a callback by its address and ignores what it returns; an exception cannot pass through it. It is
kept here and raised from the call of ``forward`` or ``wait`` that ends the run.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dlinfer.vendor.megengine.errors import LiteArgumentError, LiteCallbackError
from dlinfer.vendor.megengine.lite.config import LiteIO
from dlinfer.vendor.megengine.lite.library import AsyncCallback, IoCallback
from dlinfer.vendor.megengine.lite.tensor import Kept, LiteTensor

TensorsByIo = dict[LiteIO, LiteTensor]


class Callbacks:
    """Of one network, whose weak reference it gets."""

    def __init__(self, network: weakref.ref[Any]) -> None:
        self._network = network
        self._lock = threading.Lock()
        self._kept: dict[str, list[Any]] = {}
        self._failure: tuple[str, BaseException] | None = None

    def without_arguments(self, kind: str, function: Callable[[], Any], after: Callable[[], None]) -> Any:
        """For ``async_with_callback``. ``after`` is called when the user's function has returned or raised."""
        _callable(kind, function)

        def called() -> int:
            try:
                return _status(function())
            except BaseException as error:  # noqa: BLE001 - it cannot pass through C; ``raise_failure`` raises it
                self._keep(kind, error)
                return -1
            finally:
                after()

        return self._alive(kind, AsyncCallback(called))

    def with_tensors(self, kind: str, function: Callable[[TensorsByIo], Any]) -> Any:
        """For ``set_start_callback`` and ``set_finish_callback``."""
        _callable(kind, function)

        def called(ios: int, tensors: Any, count: int) -> int:
            try:
                described = ctypes.cast(ios, ctypes.POINTER(LiteIO)) if count else ()
                given = {}
                for index in range(count):
                    one = described[index]
                    io = LiteIO(one.name, one.is_host, one.io_type, one.config_layout)
                    tensor = LiteTensor._of(ctypes.c_void_p(tensors[index]), Kept(), owned=False)
                    tensor.network = self._network()
                    given[io] = tensor
                return _status(function(given))
            except BaseException as error:  # noqa: BLE001 - as above
                self._keep(kind, error)
                return -1

        return self._alive(kind, IoCallback(called))

    def _alive(self, kind: str, native: Any) -> Any:
        """Keep this and the one before: a run that has begun may still call that."""
        self._kept[kind] = [*self._kept.get(kind, []), native][-2:]
        return native

    def _keep(self, kind: str, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = (kind, error)

    def raise_failure(self) -> None:
        """Raise LiteCallbackError for what a callback has raised since this was last asked."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            kind, error = failure
            raise LiteCallbackError(callback=kind, detail=f"{type(error).__name__}: {error}") from error


def _callable(kind: str, function: Any) -> None:
    if not callable(function):
        raise LiteArgumentError(call=kind, argument="callback", expected="a function", given=repr(function))


def _status(returned: Any) -> int:
    return returned if isinstance(returned, int) else 0
