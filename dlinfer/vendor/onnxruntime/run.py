"""A function as an ONNX model, and the session that runs it. The session reads and writes torch's memory."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlinfer.graph.engine_kit.empty_operands import EmptyOperands
from dlinfer.graph.engine_kit.onnx_engine import as_tensor
from dlinfer.graph.engine_kit.refused import RefusedError, WrongInputError
from dlinfer.graph.engine_kit.value_region import Executable, Lowered
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.onnx.export import export
from dlinfer.graph.onnx.torch_semantics import refuse_negative
from dlinfer.graph.torch_private.onnx import onnx_type
from dlinfer.vendor.onnxruntime import sessions
from dlinfer.vendor.onnxruntime.doubts import REASON, note_doubts
from dlinfer.vendor.onnxruntime.empty_operands import shapes
from dlinfer.vendor.onnxruntime.feeds import fed
from dlinfer.vendor.onnxruntime.model import safe_in_place, with_initialisers
from dlinfer.vendor.onnxruntime.options import OrtOptions
from dlinfer.vendor.onnxruntime.translations.contrib import OPSET, table
from dlinfer.vendor.onnxruntime.translations.packed import packed_inputs


class OrtLowered(Lowered):
    """A function converted to an ONNX model.

    in_place: indices of inputs that the function writes and whose memory the session may overwrite while it runs.
    """

    placement = "session"

    def __init__(self, function: Function, options: OrtOptions, policy: str) -> None:
        super().__init__(function, function.weights if options.holds_weights else _packed(function))
        self._options = options
        self._policy = policy
        self._check_empty = EmptyOperands(function.graph_module.graph, shapes)
        weights = frozenset(function.weights)
        graph_module, self._feeds = fed(function.graph_module, weights, options.accuracy_level)
        refuse_negative(graph_module.graph)
        self._doubts = note_doubts(graph_module.graph)
        self._graph = export(graph_module, opset=OPSET, translations=table)
        self.source = str(self._graph)
        self.in_place: frozenset[int] = frozenset()
        if not self._doubts:  # torch can repeat a call that has written nothing
            self.in_place = safe_in_place(self._graph, self._feeds, function.writes) & function.in_place
        if self.held and (fault := sessions.why_refused(self._graph.to_bytes())) is not None:
            raise RefusedError(fault)  # before weights exist

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise RefusedError if an operand has no elements and ONNX Runtime would compute the call wrongly."""
        self._check_empty(inputs)

    def compile(self, weights: tuple[Tensor, ...]) -> Executable:
        """Return a callable that runs a new session with these weights."""
        inputs: Any = dict(zip(self.held, weights, strict=True))
        named = list(zip(self._graph.inputs, self._feeds, strict=True))
        held = {name: feed.of(inputs).contiguous() for name, feed in named if feed.index in inputs}
        model = with_initialisers(self._graph, list(held)) if held else self._graph.to_bytes()
        session = sessions.make_session(model, self._options, policy=self._policy, weights=held)
        feeds = {name: feed.of for name, feed in named if feed.index not in inputs}
        run = SessionRun(session, feeds, self._graph.outputs, self._memory, bool(self.in_place))
        return _doubting(run) if self._doubts else run

    def _memory(self, inputs: Sequence[Any]) -> list[Tensor]:
        outputs = self.outputs.empty(inputs, self.in_place)
        return [*outputs, torch.empty((), dtype=torch.bool)] if self._doubts else outputs


def _packed(function: Function) -> list[int]:
    """Return the indices of inputs that are parts of packed weights.

    A session always has them built in, whatever the option ``weights`` says.
    """
    packed = packed_inputs(function.graph_module.graph)
    return [index for index in function.weights if function.inputs[index] in packed]


def _doubting(run: Executable) -> Executable:
    """Return a function that calls ``run`` and drops its last result, which ``note_doubts`` added.

    The function raises RefusedError if that result is true.
    """

    def checked(*inputs: Any) -> Sequence[Tensor]:
        *values, doubt = run(*inputs)
        if doubt.item():
            raise RefusedError(REASON)
        return values

    return checked


_OF_INDICES = re.compile("out of data bounds|out of bounds|invalid indice|must be within the inclusive range")

_NOWHERE = torch.empty(1)
"""The memory that is bound for tensors without elements. torch gives them no address, but ONNX Runtime needs one."""


@dataclass
class _Binding:
    """An io binding of ONNX Runtime. Only one call uses it at a time.

    bound: name in the model -> address and sizes of the tensor that is bound to the name.
    """

    binding: Any
    bound: dict[str, tuple[int, torch.Size]] = field(default_factory=dict)

    def bind(self, bind: Callable[..., None], name: str, tensor: Tensor) -> None:
        """Bind a tensor to a name, unless its address and sizes are bound already.

        A comparison is quicker than a binding.
        bind: the method of the io binding, for an input or for an output.
        """
        place = (tensor.data_ptr() or _NOWHERE.data_ptr(), tensor.shape)
        if self.bound.get(name) != place:
            bind(name, "cpu", 0, onnx_type(tensor.dtype), list(tensor.shape), place[0])
            self.bound[name] = place


class SessionRun:
    """Runs a session: takes a function's inputs and returns its outputs. Several threads may call it concurrently.

    feeds: name in the model -> function from the function's inputs to the value.
    names: the names of the model's outputs.
    memory: a function that takes a call's inputs and allocates the call's outputs.
    in_place: whether outputs may share memory with inputs.

    Raises WrongInputError for an index out of bounds, unless ``in_place``: torch then repeats the call and raises its
    own error. With ``in_place`` torch cannot repeat the call, because it may have overwritten inputs.
    Raises ONNX Runtime's own errors in all other cases.
    """

    def __init__(
        self,
        session: Any,
        feeds: Mapping[str, Callable[[Sequence[Any]], Any]],
        names: Sequence[str],
        memory: Callable[[Sequence[Any]], list[Tensor]],
        in_place: bool,
    ) -> None:
        self._session = session
        self._feeds = feeds
        self._names = names
        self._memory = memory
        self._in_place = in_place
        self._free: list[_Binding] = []

    def __call__(self, *inputs: Any) -> list[Tensor]:
        tensors = [(name, as_tensor(feed(inputs))) for name, feed in self._feeds.items()]
        values = self._memory(inputs)
        try:
            ours = self._free.pop()
        except IndexError:
            ours = _Binding(self._session.io_binding())
        for name, value in tensors:
            ours.bind(ours.binding.bind_input, name, value)
        for name, value in zip(self._names, values, strict=True):
            ours.bind(ours.binding.bind_output, name, value)
        try:
            self._session.run_with_iobinding(ours.binding)
        except (RuntimeError, *sessions.ort_errors()) as cause:
            if not self._in_place and _OF_INDICES.search(str(cause)):
                raise WrongInputError(str(cause)) from cause
            raise
        self._free.append(ours)
        return values
