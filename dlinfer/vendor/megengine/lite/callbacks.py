"""A network's callbacks: kept alive as long as the library may call them, and what they raise kept for the caller.

The library knows a callback by its address and ignores what it returns; an exception cannot pass through it. It is
kept here and raised from the call of ``forward`` or ``wait`` that ends the run.
"""

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
"""Of each kind the latest and the one before, which a run that has begun may still call."""

_here = threading.local()


def running_one(network: object = None) -> bool:
    """Return whether this thread is inside a callback (of ``network``, a Callbacks' ``mark``, where one is given).

    There the library may not be asked to end a network, nor to run or wait for the callback's own.
    """
    running = getattr(_here, "running", ())
    return bool(running) if network is None else network in running


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
    """Of one network, whose weak reference it gets.

    natives: what the library calls. It must outlive the network in the library, and knows the user's functions, which
    often know the network, only weakly: they go with this object. mark: of the network, for ``running_one``.
    """

    def __init__(self, network: weakref.ref[Any]) -> None:
        self.natives: dict[str, list[Any]] = {}
        self.mark = object()
        self._network = network
        self._functions: dict[str, dict[int, Callable[..., Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._failure: tuple[str, BaseException] | None = None

    def without_arguments(self, kind: str, wanted: Callable[[], Any]) -> Any:
        """For ``async_with_callback``."""
        return self._native(AsyncCallback, kind, wanted, lambda: ())

    def with_tensors(self, kind: str, wanted: Callable[[TensorsByIo], Any]) -> Any:
        """For ``set_start_callback`` and ``set_finish_callback``."""
        network = self._network
        return self._native(IoCallback, kind, wanted, lambda *told: (_given(network(), *told),))

    def _native(
        self, prototype: Any, kind: str, wanted: Callable[..., Any], arguments: Callable[..., Any]
    ) -> Any:
        """What the library calls: ``wanted``, while it is kept here, with ``arguments`` of what the library tells.

        The network is told when it has returned or raised.
        """
        function(kind, "callback", wanted)
        number, mark, callbacks, network = next(self._numbers), self.mark, weakref.ref(self), self._network
        functions = self._functions.setdefault(kind, {})
        functions[number] = wanted
        for old in list(functions)[:-_KEPT]:
            del functions[old]

        def called(*told: Any) -> int:
            with _inside(mark):
                status = run(*told)
                _ended(network(), kind)
                return status

        def run(*told: Any) -> int:
            mine = callbacks()
            kept = mine._functions[kind].get(number) if mine is not None else None
            if mine is None or kept is None:
                return 0  # the network is being given up
            try:
                returned = kept(*arguments(*told))
            except BaseException as error:  # noqa: BLE001 - it cannot pass through C; ``raise_failure`` raises it
                with mine._lock:
                    mine._failure = mine._failure or (kind, error)
                return -1
            return returned if isinstance(returned, int) else 0

        native = prototype(called)
        self.natives[kind] = [*self.natives.get(kind, []), native][-_KEPT:]
        return native

    def raise_failure(self) -> None:
        """Raise LiteCallbackError for what a callback has raised since this was last asked."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            kind, error = failure
            raise LiteCallbackError(callback=kind, detail=f"{type(error).__name__}: {error}") from error


def _ended(network: Any, kind: str) -> None:
    """Tell a network, of which no reference may outlive ``_inside``: its end would wait for the callback."""
    if network is not None:
        network._callback_ended(kind)


def _given(network: Any, ios: int, tensors: Any, count: int) -> TensorsByIo:
    """The dict that a callback gets, of what the library passes."""
    described = ctypes.cast(ios, ctypes.POINTER(LiteIO)) if count else ()
    given = {}
    for index in range(count):
        one = described[index]
        io = LiteIO(one.name, one.is_host, one.io_type, one.config_layout)
        given[io] = network._tensor(io.name, tensors[index])
    return given
