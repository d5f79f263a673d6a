"""A session at run time: torch's tensors bound where they lie, and results where torch wants them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.graph.functional.function import Function
from dlinfer.graph.functional.overlap import overlapping
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.seam.onnx import onnx_type
from dlinfer.vendor.onnxruntime.feeds import Feed

Sizes = Callable[[Sequence[Any]], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Io:
    """How a function's inputs and results meet a session.

    feeds: (name in the model, what is fed) of what is passed at each call. outputs: names of the function's results.
    dtypes, sizes: of the results; the sizes from the inputs of a call.
    in_place: indices of written inputs whose memory may be the result's own while the session runs.
    steady: indices of inputs that are the same tensors at each call, and not written.
    """

    feeds: Sequence[tuple[str, Feed]]
    outputs: Sequence[str]
    dtypes: Sequence[torch.dtype]
    sizes: Sizes
    in_place: frozenset[int]
    steady: frozenset[int]


_NOWHERE = torch.empty(1)
"""Where a tensor without elements is said to lie: torch gives it no address, and ONNX Runtime wants one."""


class Conflict(Exception):
    """The inputs of a call share memory that is written, so that the function is not the region; its text says why."""


@dataclass
class _Binding:
    """An io binding, and the address and sizes that each name is bound to. One call uses it at a time."""

    binding: Any
    bound: dict[str, tuple[int, torch.Size]] = field(default_factory=dict)

    def bind(self, bind: Callable[..., None], name: str, tensor: torch.Tensor) -> None:
        """Binding takes microseconds, comparing a fraction of one."""
        place = (tensor.data_ptr() or _NOWHERE.data_ptr(), tensor.shape)
        if self.bound.get(name) != place:
            bind(name, "cpu", 0, onnx_type(tensor.dtype), list(tensor.shape), place[0])
            self.bound[name] = place


class SessionRun:
    """Callable with a region's inputs, gives the tuple of its outputs. Threads may call it at once. Raises Conflict."""

    def __init__(self, session: Any, function: Function, io: Io) -> None:
        self._session = session
        self._function = function
        self._io = io
        self._free: list[_Binding] = []
        self._written = frozenset(index for index in function.writes if index is not None)
        placeholders = function.graph_module.graph.find_nodes(op="placeholder")
        self._moving = [
            index
            for index, node in enumerate(placeholders)
            if index not in io.steady and isinstance(fake(node), torch.Tensor)
        ]
        self._apart: tuple[int, ...] | None = None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        self._function.check(inputs)
        if self._written:
            self._refuse_conflict(inputs)
        given = [(name, _packed(feed.of(inputs))) for name, feed in self._io.feeds]
        values = self._results(inputs)
        try:
            ours = self._free.pop()
        except IndexError:
            ours = _Binding(self._session.io_binding())
        for name, value in given:
            ours.bind(ours.binding.bind_input, name, value)
        for name, value in zip(self._io.outputs, values, strict=True):
            ours.bind(ours.binding.bind_output, name, value)
        self._session.run_with_iobinding(ours.binding)
        self._free.append(ours)
        for index, value in zip(self._function.writes, values, strict=True):
            if index is not None and value is not inputs[index]:
                inputs[index].copy_(value)
        return self._function.finish(inputs, values)

    def _results(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Memory for each result: an input's own where that is safe, else new."""
        return [
            inputs[index]
            if index is not None and index in self._io.in_place and inputs[index].is_contiguous()
            else torch.empty(shape, dtype=dtype)
            for index, shape, dtype in zip(
                self._function.writes, self._io.sizes(inputs), self._io.dtypes, strict=True
            )
        ]

    def _refuse_conflict(self, inputs: Sequence[Any]) -> None:
        """Raise Conflict. Weights are looked at again only when one of them, or what is written, has moved."""
        written = {place for place, index in enumerate(self._moving) if index in self._written}
        reason = overlapping([inputs[index] for index in self._moving], written)
        places = tuple(inputs[index].data_ptr() for index in (*self._io.steady, *self._written))
        if reason is None and places != self._apart:
            reason = self._function.conflict(inputs)
            self._apart = places
        if reason is not None:
            self._apart = None
            raise Conflict(reason)


def _packed(value: Any) -> torch.Tensor:
    """What ONNX Runtime takes: a contiguous tensor, a number in one."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value)
    return value if value.is_contiguous() else value.contiguous()
