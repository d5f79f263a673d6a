"""The table of lowerings: the ops that OpenVINO runs, each with a capability check.

A lowering is a function with its check beside it::

    @lowers(aten.flip.default, refuses=_needs_fixed_dims)
    def flip(b, x, dims): ...

The function takes the builder and the op's arguments in the schema's order, tensors as OpenVINO outputs. It returns the
op's results. A keyword-only parameter gets the argument of its name, or its own default if the overload has no such
argument. A function with such parameters gets only as many positional arguments as it declares::

    @lowers(aten.sum.default, aten.sum.dim_IntList)
    def sum_(b, x, *, dim=None, keepdim=False): ...

The check takes the Call before anything is built. It returns a reason to refuse the call, or None to take it."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dlinfer import ops
from dlinfer.graph.engine_kit.empty_operands import first_factor, without_elements
from dlinfer.graph.ir.dialect import arguments, fake, op_name, overload
from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino import dtypes

assert ops  # imported for torch.ops.dlinfer, which lowerings name when they register
_aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """A call of an op, or of a Python function on sizes.

    target: the op or function.
    name: the target's name in messages.
    result: the fake tensor, or symbolic number, of the call's result.
    arguments: parameter name (for a Python function: position) -> argument. Values in the graph are nodes."""

    target: Any
    arguments: Mapping[Any, Any]
    result: Any
    name: str

    @classmethod
    def of(cls, node: fx.Node) -> "Call":
        values = dict(enumerate(node.args)) if overload(node) is None else arguments(node)
        return cls(node.target, values, fake(node), op_name(node))

    def fake(self, parameter: Any) -> Any:
        """Return an argument with fake tensors and symbolic numbers in place of nodes, also inside a list."""
        value = self.arguments[parameter]
        if isinstance(value, (list, tuple)):
            return [fake(item) if isinstance(item, fx.Node) else item for item in value]
        return fake(value) if isinstance(value, fx.Node) else value

    def is_node(self, parameter: Any) -> bool:
        """Return whether an argument is a node of the graph, not a fixed value."""
        return isinstance(self.arguments[parameter], fx.Node)


Check = Callable[[Call], str | None]
Build = Callable[..., Any]


@dataclass(frozen=True)
class Lowering:
    """How to lower an op.

    build: builds the op in OpenVINO. refuses: returns a reason if a call cannot be lowered, else None.
    takes_rows: whether ``build`` takes ``written.Rows``; otherwise it gets the whole tensor in their place."""

    build: Build
    refuses: Check
    takes_rows: bool

    def by_position(self, arguments: Mapping[Any, Any]) -> Sequence[Any]:
        """Return the arguments that ``build`` takes by position, after the builder."""
        kinds = [parameter.kind for parameter in inspect.signature(self.build).parameters.values()]
        values = list(arguments.values())
        return values[: len(kinds) - kinds.count(_NAMED) - 1] if _NAMED in kinds else values

    def by_name(self, arguments: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the arguments that ``build`` takes by name."""
        parameters = inspect.signature(self.build).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind is _NAMED]
        return {name: arguments[name] for name in names if name in arguments}


_NAMED = inspect.Parameter.KEYWORD_ONLY
_table: dict[Any, Lowering] = {}


def taken(call: Call) -> str | None:
    """Accept every call: the check of ops that OpenVINO always runs."""
    return None


def unless(is_taken: Callable[[Call], Any], reason: str) -> Check:
    """Return a check that refuses a call, with ``reason``, if ``is_taken`` is false for the call."""
    return lambda call: None if is_taken(call) else reason


def defaults(names: str) -> list[Any]:
    """Return the overload ``default`` of each aten op that is named in ``names``, which spaces separate."""
    return [getattr(_aten, name).default for name in names.split()]


def lowers(*targets: Any, refuses: Check = taken, takes_rows: bool = False) -> Callable[[Build], Build]:
    """Register the decorated function as the lowering of ``targets``: ops, or Python functions on sizes."""

    def register(build: Build) -> Build:
        for target in targets:
            if target in _table:
                raise ValueError(f"{target} has two lowerings")
            _table[target] = Lowering(build, refuses, takes_rows)
        return build

    return register


def lowering(target: Any) -> Lowering | None:
    return _table.get(target)


def refusal(call: Call) -> str | None:
    entry = _table.get(call.target)
    if entry is None:
        return f"the engine has no lowering for {call.name}"
    for value in pytree.tree_leaves((list(map(call.fake, call.arguments)), call.result)):
        if isinstance(value, Tensor) and (reason := dtypes.refusal(value.dtype)) is not None:
            return reason
    if any(fixed_size(size) == 0 for shape in not_empty(call) for size in shape):
        return without_elements(call.name)
    return entry.refuses(call)


_EXTREMES = (_aten.amax, _aten.amin, _aten.max, _aten.min, _aten.argmax, _aten.argmin, _aten.aminmax)
_REDUCED = (*_EXTREMES, _aten.logsumexp, _aten.var, _aten.std, _aten.var_mean, _aten.std_mean)


def not_empty(call: Call) -> Iterator[Sequence[Any]]:
    """Yield the sizes of a call that must not be 0, because OpenVINO would return wrong numbers or crash.

    They are the number of keys in attention, the summed dimension of a matrix product, and the reduced dimensions of
    extremes and deviations. For no keys, and for a product over nothing, torch returns zeros; OpenVINO gets such a
    product wrong if a factor is a weight. For the maximum of no elements torch raises. For the deviation of no elements
    torch returns NaN, and OpenVINO may crash."""
    packet = getattr(call.target, "overloadpacket", None)
    if packet is _aten.scaled_dot_product_attention:
        yield call.fake("key").shape[-2:-1]
    elif (name := first_factor(packet, call.arguments)) is not None:
        yield [size for size in call.fake(name).shape[-1:] if fixed_size(size) is not None]
    elif packet in _REDUCED and call.target not in (_aten.max.other, _aten.min.other):
        shape, dim = call.fake("self").shape, call.arguments.get("dim")
        dims = dim if isinstance(dim, (list, tuple)) and dim else [dim]
        if shape:
            yield shape if dims == [None] or dim == [] else [shape[axis] for axis in dims]
