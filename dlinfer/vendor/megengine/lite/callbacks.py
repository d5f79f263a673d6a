"""A network's callbacks: they stay alive as long as the library may call them, and their exceptions reach the caller.

The library knows a callback by its address and ignores its result. An exception cannot pass through C, so this module
stores it. The call of ``forward`` or ``wait`` that ends the run raises it."""

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dlinfer.vendor.megengine.errors import LiteCallbackError
from dlinfer.vendor.megengine.lite.binding.checks import function
from dlinfer.vendor.megengine.lite.binding.library import AsyncCallback, IoCallback, library
from dlinfer.vendor.megengine.lite.config import LiteIO
from dlinfer.vendor.megengine.lite.tensor import LiteTensor

TensorsByIo = dict[LiteIO, LiteTensor]

_KEPT = 2
"""The number of callbacks of each kind to keep: the latest, and its predecessor, which a current run may still call."""

_here = threading.local()


def inside_callback(mark: object = None) -> bool:
    """Return whether this thread is inside a callback of any network, or of the network with this ``mark``.

    No network may be destroyed inside a callback. The callback's own network may neither run nor be waited for."""
    running = getattr(_here, "running", ())
    return bool(running) if mark is None else mark in running


@contextlib.contextmanager
def _inside(mark: object) -> Iterator[None]:
    before = getattr(_here, "running", ())
    _here.running = (*before, mark)
    try:
        with library().callers_numbers():
            yield
    finally:
        _here.running = before


class Callbacks:
    """The callbacks of one network. This object refers to the network only weakly.

    natives: the C functions that the library calls. They must exist until the library has destroyed the network. They
        refer to the user's functions weakly, because a user's function often refers to the network.
    mark: the object that identifies the network in ``inside_callback``."""

    def __init__(self, network: weakref.ref[Any]) -> None:
        self.natives: dict[str, list[Any]] = {}
        self.mark = object()
        self._network = network
        self._functions: dict[str, dict[int, Callable[..., Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._failure: tuple[str, BaseException] | None = None

    def without_arguments(self, kind: str, user: Callable[[], Any]) -> Any:
        """Return a C function that calls ``user()``. kind: the LiteNetwork method that the caller gave ``user`` to."""
        return self._native(AsyncCallback, kind, user, lambda: ())

    def with_tensors(self, kind: str, user: Callable[[TensorsByIo], Any]) -> Any:
        """Return a C function that calls ``user`` with the network's tensors. kind: see ``without_arguments``."""
        network = self._network
        return self._native(IoCallback, kind, user, lambda *native: (_tensors(network(), *native),))

    def _native(
        self, prototype: Any, kind: str, user: Callable[..., Any], convert: Callable[..., Any]
    ) -> Any:
        """Return a C function that calls ``user`` and then tells the network that the callback has ended.

        The C function skips ``user`` if another callback has replaced it, or if the network is being destroyed.
        prototype: the C type of the function. convert: makes ``user``'s arguments from the C arguments."""
        function(kind, "callback", user)
        number, mark, callbacks, network = next(self._numbers), self.mark, weakref.ref(self), self._network
        functions = self._functions.setdefault(kind, {})
        functions[number] = user
        for old in list(functions)[:-_KEPT]:
            del functions[old]

        def called(*native: Any) -> int:
            with _inside(mark):
                status = run(*native)
                _ended(network(), kind)
                return status

        def run(*native: Any) -> int:
            mine = callbacks()
            kept = mine._functions[kind].get(number) if mine is not None else None
            if mine is None or kept is None:
                return 0  # the network is being destroyed
            try:
                returned = kept(*convert(*native))
            except BaseException as error:  # noqa: BLE001 - it cannot pass through C; ``raise_failure`` raises it
                with mine._lock:
                    mine._failure = mine._failure or (kind, error)
                return -1
            return returned if isinstance(returned, int) else 0

        native = prototype(called)
        self.natives[kind] = [*self.natives.get(kind, []), native][-_KEPT:]
        return native

    def raise_failure(self) -> None:
        """Raise LiteCallbackError if a callback has raised an exception since the last call of this method."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            kind, error = failure
            raise LiteCallbackError(callback=kind, detail=f"{type(error).__name__}: {error}") from error


def _ended(network: Any, kind: str) -> None:
    """Tell a network that its callback has ended.

    The end of this function may drop the last reference to the network. Then the network's finalizer runs in this
    thread. ``_inside`` tells the finalizer that it must not wait here, because it would wait for this very thread. So
    the caller must call this function inside ``_inside``, and must keep no reference of its own to the network."""
    if network is not None:
        network._callback_ended(kind)


def _tensors(network: Any, ios: int, tensors: Any, count: int) -> TensorsByIo:
    natives = ctypes.cast(ios, ctypes.POINTER(LiteIO)) if count else ()
    by_io = {}
    for index in range(count):
        native = natives[index]
        io = LiteIO(native.name, native.is_host, native.io_type, native.config_layout)
        by_io[io] = network._tensor(io.name, tensors[index])
    return by_io
