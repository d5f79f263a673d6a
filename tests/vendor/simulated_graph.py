"""A stand-in of the graphs that devices like CUDA's capture: strict about what a capture forbids.

Between ``capture_begin`` and ``capture_end`` each op of a device is recorded with where its tensors lie; ``replay``
runs the ops on the same memory. Results of the capture belong to the graph, as to a graph's pool. What was made
before is only known by where it lies: a replay after its memory was given back is a fault, where a real graph reads
what lies there now. Ops run at the capture too, where a real one leaves results undefined: so they become NaN.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dlinfer.conformance import stand_in

aten = torch.ops.aten
_HOST_READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.lift_fresh.default,  # torch.tensor(..., device=), which has copied numbers of the host already
}
"""Ops that wait for the device, since the host needs a number or a size."""

_now = threading.local()


class CaptureFault(RuntimeError):
    """What a driver refuses while it captures, or of a graph."""


def capturing() -> bool:
    """Whether this thread captures, and no op of the capture is being computed."""
    return getattr(_now, "graph", None) is not None and not getattr(_now, "inside", False)


def refuse(what: str) -> None:
    """Raise CaptureFault where a call is not permitted while a graph is captured."""
    if capturing():
        raise CaptureFault(f"operation not permitted when stream is capturing: {what}")


def record(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run and record a function of the vendor's that is no op of torch."""
    return _now.graph._run(name, function, args, kwargs)


@dataclass
class _Outside:
    """A tensor from before the capture: where it lies, and how."""

    storage: StorageWeakRef
    dtype: torch.dtype
    lies: tuple[Any, ...]
    like: torch.device

    def tensor(self, name: str) -> Tensor:
        if self.storage.expired():
            raise CaptureFault(f"{name}: a tensor that the graph reads was freed")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        offset, sizes, strides = self.lies
        return torch.empty(0, dtype=self.dtype, device=self.like).set_(storage, offset, sizes, strides)


class Graph:
    """As ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, Callable[..., Any], Any, Any]] = []
        self._own: set[int] = set()
        self._mode: _Recording | None = None
        self._done = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Record what this thread does from now on."""
        if getattr(_now, "graph", None) is not None:
            raise CaptureFault("a capture is going on already")
        if self._done:
            raise CaptureFault("the graph was captured already")
        _now.graph, self._mode = self, self._recording()
        self._mode.__enter__()

    def _recording(self) -> "_Recording":
        return _Recording(self)

    def capture_end(self) -> None:
        """End it. Results of the capture hold nothing before the first replay."""
        if getattr(_now, "graph", None) is not self or self._mode is None:
            raise CaptureFault("the graph is not being captured")
        self._mode.__exit__(None, None, None)
        _now.graph, self._mode, self._done = None, None, True
        for _, _, _, out in self._calls:
            for one in out:
                if one is not None and one.is_floating_point():
                    stand_in.on_host(one).fill_(float("nan"))

    def replay(self) -> None:
        """Run what was recorded, on the memory that it was recorded with."""
        if not self._done:
            raise CaptureFault("the graph was not captured")
        refuse("replay of another graph")
        for call in self._calls:
            self._repeat(*call)

    def _repeat(self, name: str, function: Callable[..., Any], given: Any, out: list[Tensor | None]) -> None:
        args, kwargs = pytree.tree_map_only(_Outside, lambda one: one.tensor(name), given)
        again = function(*args, **kwargs)
        for old, new in zip(out, pytree.tree_leaves(again), strict=True):
            if old is not None and old.data_ptr() != new.data_ptr():
                stand_in.on_host(old).copy_(stand_in.on_host(new))

    def reset(self) -> None:
        """Give its memory back."""
        self._calls.clear()
        self._done = False

    def _owns(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._own

    def _run(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = pytree.tree_map_only(Tensor, self._known, (args, kwargs))
        before = {
            x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        _now.inside = True
        try:
            with _disable_current_modes():
                out = function(*args, **kwargs)
        finally:
            _now.inside = False
        kept = []
        for one in pytree.tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in before:
                self._own.add(one.untyped_storage()._cdata)
            # a view of what was there before must not keep it alive
            kept.append(one if isinstance(one, Tensor) and self._owns(one) else None)
        self._calls.append((name, function, given, kept))
        return out

    def _known(self, x: Tensor) -> Any:
        if self._owns(x):
            return x
        storage = x.untyped_storage()
        lies = x.storage_offset(), tuple(x.shape), x.stride()
        return _Outside(StorageWeakRef(storage), x.dtype, lies, x.device)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "dlinfer":  # what its kernel calls is captured, and may be forbidden
            with self:
                return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        kinds = {x.device.type for x in tensors if x.numel()}
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        on_device = bool(kinds - {"cpu"}) or target not in (None, "cpu")
        if not on_device:
            return func(*args, **kwargs)  # the host's own work is no part of a graph
        crosses = len(kinds | ({target} if target and tensors else set())) > 1
        if func in _HOST_READS or _chooses(func, args) or (crosses and any(x.dim() for x in tensors)):
            refuse(f"{func} waits for the host")
        return self._graph._run(str(func), func, args, kwargs)


def _chooses(func: Any, args: Any) -> bool:
    """Whether an index is a mask, of which the host needs the count."""
    if func not in (aten.index.Tensor, aten.index_put_.default):
        return False
    return any(isinstance(one, Tensor) and one.dtype is torch.bool for one in args[1])
