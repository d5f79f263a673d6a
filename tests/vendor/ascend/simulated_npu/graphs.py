"""A stand-in of ``torch.npu.NPUGraph`` with its task groups and external events, as torch_npu's Python has them.

A captured call keeps the host's numbers of its capture. A call in a task group is told others between
``graph_task_update_begin`` and ``_end``; a replay stands at an ExternalEvent that the capture waited for until it is
recorded. Here that is strict: work behind a replay that stands is refused, where a card's queue would hang once the
host waits for it. So are updates that may overtake the replay before (``streams``), that change more than lengths, or
whose tensors lie elsewhere than the captured ones.

Sources: torch_npu 2.13.0, ``npu/graphs.py`` (_GraphDispatchMode), ``npu/streams.py`` (ExternalEvent) and torchair's
``acl_graph.py`` (CapturedGraphUpdateAndReplay); what its driver allows beyond that order of calls is not known.
"""

import contextlib
import ctypes
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dlinfer.conformance.stand_in import memory
from tests.vendor import simulated_graph
from tests.vendor.ascend.simulated_npu import streams
from tests.vendor.ascend.simulated_npu.streams import Stream
from tests.vendor.simulated_graph import CaptureFault, capturing

SPACES = ("npu", "atb")
LENGTHS = {"actual_seq_lengths", "actual_seq_lengths_kv", "context_lens"}
"""Arguments that torch_npu's handlers of graphs, and the known use of the latent attention, tell anew."""

_now = threading.local()


@dataclass
class Update:
    """What is between an update's begin and its end."""

    stream: Stream
    handle: "TaskGroup"
    left: list[int]


@dataclass
class TaskGroup:
    """What ``graph_task_group_end`` gives: calls of a graph, by their places in it."""

    graph: "NPUGraph"
    calls: list[int] = field(default_factory=list)


class ExternalEvent:
    """As ``torch.npu.ExternalEvent``: it may be waited for before it is recorded, and stays recorded until a reset."""

    def __init__(self) -> None:
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or streams.current()
        if capturing():
            raise CaptureFault("an ExternalEvent is recorded outside of what waits for it")
        update = _update()
        if update is not None and update.stream is stream:
            raise CaptureFault("an event is recorded before its update has ended")
        self.recorded = True
        _go_on()

    def wait(self, stream: Stream | None = None) -> None:
        if capturing():
            _graph_of(stream).note("ExternalEvent.wait", self)
        elif not self.recorded:
            raise CaptureFault("a stream waits for an ExternalEvent that nobody has recorded")

    def reset(self, stream: Stream | None = None) -> None:
        if capturing():
            _graph_of(stream).note("ExternalEvent.reset", self)
        else:
            self.recorded = False


class NPUGraph(simulated_graph.Graph):
    """As ``torch.npu.NPUGraph``, without its own ``update``."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Stream | None = None
        self.group: TaskGroup | None = None
        self.replays: list[int] = [0]
        self.standing: Generator[None, None, None] | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """On a stream of its own, as for CUDA's graphs."""
        if streams.current() is streams.DEFAULT:
            raise CaptureFault("a graph is captured on another stream than the default one")
        self.stream = streams.current()
        super().capture_begin(pool, capture_error_mode)

    def capture_end(self) -> None:
        super().capture_end()
        if self.group is not None:
            raise CaptureFault("a capture ends within a task group")

    def replay(self) -> None:
        """Up to the first event that is not recorded, and on from there once it is."""
        if not self._done:
            raise CaptureFault("the graph was not captured")
        simulated_graph.refuse("replay of another graph")
        refuse_standing("replay")
        streams.launched[0] += 1
        self.replays.append(streams.launched[0])
        streams.current().after = streams.launched[0]
        self.standing = self._steps()
        _now.standing = self
        _go_on()

    def reset(self) -> None:
        super().reset()
        self.replays = [0]

    def note(self, name: str, event: ExternalEvent) -> None:
        """An event's place among the calls."""
        self._calls.append((name, event, None, []))  # pyright: ignore[reportArgumentType]

    def tell(self, place: int, given: dict[str, Any]) -> None:
        """Other arguments of a captured call."""
        name, function, _, out = self._calls[place]
        self._calls[place] = name, function, ((), given), out

    def call(self, place: int) -> tuple[Any, dict[str, Any]]:
        """A captured call of the vendor's: the op and its arguments."""
        _, function, (_, given), _ = self._calls[place]
        return function, given

    def _steps(self) -> Generator[None, None, None]:
        for place in range(len(self._calls)):
            name, function, given, out = self._calls[place]
            if name == "ExternalEvent.wait":
                while not function.recorded:  # pyright: ignore[reportFunctionMemberAccess]
                    yield
            elif name == "ExternalEvent.reset":
                function.recorded = False  # pyright: ignore[reportFunctionMemberAccess]
            else:
                self._repeat(name, function, given, out)

    def _recording(self) -> Any:
        return _Recording(self)

    def _run(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        vendors = function.namespace in SPACES
        if self.group is not None and not vendors:
            raise CaptureFault(f"{name}: a task group holds the vendor's own op")
        if vendors:
            args, kwargs = (), bound(function._schema, args, kwargs)
        out = super()._run(name, function, args, kwargs)
        if self.group is not None:
            if any(one is not None and self._owns(one) for one in self._fresh(out, kwargs)):
                raise CaptureFault(f"{name}: results of a task group's op have to be given to it")
            if "workspace" in kwargs and kwargs["workspace"] is None:
                raise CaptureFault(f"{name}: a workspace of the largest size has to be given in a task group")
            self.group.calls.append(len(self._calls) - 1)
        return out

    def _fresh(self, out: Any, given: dict[str, Any]) -> list[Tensor]:
        known = {x.data_ptr() for x in pytree.tree_leaves(given) if isinstance(x, Tensor)}
        return [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.data_ptr() not in known]

    def _known(self, x: Tensor) -> Any:
        return (
            x.clone() if x.device.type == "cpu" else super()._known(x)
        )  # the host's numbers, as they are now


class _Recording(simulated_graph._Recording):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in SPACES:  # which arguments lie on the host is the op's own concern
            return self._graph._run(str(func), func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Standing(TorchDispatchMode):
    """While a replay stands: work of the device is refused, but for an update's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_device = any(
            x.device.type != "cpu" for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        )
        if on_device and not updating() and _now.mode is self:
            _now.mode = None  # torch has taken it off already, and puts it back: it does nothing any more
            refuse_standing(str(func))
        return func(*args, **kwargs)


def _go_on() -> None:
    """Let the replay that stands in this thread go on as far as it comes."""
    graph: NPUGraph | None = getattr(_now, "standing", None)
    if graph is None or graph.standing is None:
        return
    mode: _Standing | None = getattr(_now, "mode", None)
    if mode is not None:
        mode.__exit__(None, None, None)
        _now.mode = None
    try:
        next(graph.standing)
    except StopIteration:
        graph.standing = _now.standing = None
    except BaseException:
        graph.standing = _now.standing = None
        raise
    else:
        _now.mode = _Standing()
        _now.mode.__enter__()


def refuse_standing(what: str) -> None:
    """Raise CaptureFault behind a replay that waits for an event, and give that replay up."""
    graph: NPUGraph | None = getattr(_now, "standing", None)
    if graph is not None:
        graph.standing = _now.standing = None
        if _now.mode is not None:
            _now.mode.__exit__(None, None, None)
            _now.mode = None
        raise CaptureFault(f"{what}: it comes behind a replay that waits for an ExternalEvent for ever")


def forget() -> None:
    """Give up a replay that stands and an update that is open, which a test left in this thread."""
    _now.update = None
    with contextlib.suppress(CaptureFault):
        refuse_standing("forget")


def bound(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by their names."""
    names = [one.name for one in schema.arguments if not one.kwarg_only]
    defaults = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


# --- torch.npu's functions


def _graph_of(stream: Stream | None) -> NPUGraph:
    graph: NPUGraph = simulated_graph._now.graph
    if (stream or streams.current()) is not graph.stream:
        raise CaptureFault("another stream than the one that is captured")
    return graph


def graph_task_group_begin(stream: Stream) -> None:
    if not capturing():
        raise CaptureFault("a task group is begun outside of a capture")
    graph = _graph_of(stream)
    if graph.group is not None:
        raise CaptureFault("a task group is begun within another")
    graph.group = TaskGroup(graph)


def graph_task_group_end(stream: Stream) -> TaskGroup:
    group = _graph_of(stream).group if capturing() else None
    if group is None:
        raise CaptureFault("a task group ends that was not begun")
    if not group.calls:
        raise CaptureFault("a task group without a task")
    group.graph.group = None
    return group


def _update() -> Update | None:
    return getattr(_now, "update", None)


def graph_task_update_begin(stream: Stream, handle: TaskGroup) -> None:
    simulated_graph.refuse("update of a task")
    if _update() is not None:
        raise CaptureFault("an update is begun within another")
    graph = handle.graph
    if not graph._done:
        raise CaptureFault("the handle is of a graph that is not captured, or was reset")
    if stream is graph.stream or stream is streams.DEFAULT:
        raise CaptureFault("tasks are updated on a stream of their own")
    before = graph.replays[-2] if graph.standing is not None else graph.replays[-1]
    if max(stream.after, streams.host_waited()) < before:
        raise CaptureFault(
            "the update may overtake the replay before, of which nothing says that it has ended"
        )
    _now.update = Update(stream, handle, list(handle.calls))


def graph_task_update_end(stream: Stream) -> None:
    update, _now.update = _update(), None
    if update is None or update.stream is not stream:
        raise CaptureFault("an update ends that was not begun on this stream")
    if update.left:
        raise CaptureFault("an update ends without a call of each task of its group")


def updating() -> bool:
    """Whether the vendor's calls of this thread update a task now, instead of being computed."""
    update = _update()
    return update is not None and update.stream is streams.current()


def tell(schema: Any, given: dict[str, Any]) -> Any:
    """Take a call within an update for the next task of its group. given: all its arguments."""
    update = _update()
    assert update is not None
    if not update.left:
        raise CaptureFault(f"{schema.name}: the group has no further task")
    place, graph = update.left.pop(0), update.handle.graph
    function, before = graph.call(place)
    if str(function._schema) != str(schema):
        raise CaptureFault(f"{schema.name} updates a task of {function._schema.name}")
    told = dict(before)
    for name, old in before.items():
        if name not in LENGTHS or old is None:
            if _lies(old) != _lies(given[name]):
                raise CaptureFault(f"{schema.name}: an update changes lengths alone, and {name} is another")
        elif len(given[name]) != len(old):
            raise CaptureFault(f"{schema.name}: {len(given[name])} lengths for a task of {len(old)}")
        else:
            told[name] = given[name].clone() if isinstance(given[name], Tensor) else list(given[name])
    graph.tell(place, told)
    return tuple(given["out"]) if schema.returns else None


def _lies(value: Any) -> Any:
    """What has to be the same in an update: of tensors where they lie."""

    def of(x: Any) -> Any:
        if isinstance(x, simulated_graph._Outside):
            x = x.tensor("update")
        return (x.data_ptr(), x.dtype, tuple(x.shape), x.stride()) if isinstance(x, Tensor) else x

    return [of(one) for one in value] if isinstance(value, (list, tuple)) else of(value)


def weak_reference(tensor: Tensor) -> Tensor:
    """As ``torch_npu._C._weak_ref_tensor``: a tensor that lies where ``tensor`` does, and keeps no memory."""
    with _disable_current_modes():
        size = tensor.untyped_storage().nbytes()
        memory_of = (ctypes.c_byte * size).from_address(tensor.untyped_storage().data_ptr())
        flat = memory._moved(torch.frombuffer(memory_of, dtype=tensor.dtype), memory._EXTENSION)
        return memory.strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())
