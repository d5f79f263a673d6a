"""Which ops OpenVINO is given, how each is written in its opset, and what of it is not taken.

A lowering is a function with its capability check beside it::

    @lowers(aten.flip.default, refuses=_needs_fixed_dims)
    def flip(b, x, dims): ...

It takes the builder and the op's arguments in the schema's order, tensors as OpenVINO outputs, and gives the op's
results. A keyword-only parameter is given the argument of its name, or its own default where the overload has no such
argument; a function with such parameters is given no others behind those by position::

    @lowers(aten.sum.default, aten.sum.dim_IntList)
    def sum_(b, x, *, dim=None, keepdim=False): ...

The check takes the Call, before anything is built.
"""

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


@dataclass(frozen=True)
class Call:
    """One call of an op or of a Python function on sizes.

    target: what is called. given: parameter name, or position, -> argument, in which nodes stand for values.
    result: its fake result. name: what people call it.
    """

    target: Any
    given: Mapping[Any, Any]
    result: Any
    name: str

    @classmethod
    def of(cls, node: fx.Node) -> "Call":
        """The call that a node is."""
        given = dict(enumerate(node.args)) if overload(node) is None else arguments(node)
        return cls(node.target, given, fake(node), op_name(node))

    def fake(self, parameter: Any) -> Any:
        """The fake value of an argument: of a node, or of each node in a list."""
        value = self.given[parameter]
        if isinstance(value, (list, tuple)):
            return [fake(item) if isinstance(item, fx.Node) else item for item in value]
        return fake(value) if isinstance(value, fx.Node) else value

    def is_node(self, parameter: Any) -> bool:
        """Whether an argument is a value that the graph computes."""
        return isinstance(self.given[parameter], fx.Node)


Check = Callable[[Call], str | None]
Build = Callable[..., Any]


@dataclass(frozen=True)
class Lowering:
    """build: makes the op in OpenVINO. refuses: why a call of it is not taken.

    takes_rows: whether it takes ``written.Rows``; else they are put together for it.
    """

    build: Build
    refuses: Check
    takes_rows: bool

    def by_position(self, given: Mapping[Any, Any]) -> Sequence[Any]:
        """The arguments that ``build`` takes by position, behind the builder."""
        kinds = [one.kind for one in inspect.signature(self.build).parameters.values()]
        values = list(given.values())
        return values[: len(kinds) - kinds.count(_NAMED) - 1] if _NAMED in kinds else values

    def by_name(self, given: Mapping[Any, Any]) -> dict[str, Any]:
        """The arguments that ``build`` takes by name."""
        parameters = inspect.signature(self.build).parameters.values()
        return {one.name: given[one.name] for one in parameters if one.kind is _NAMED and one.name in given}


_NAMED = inspect.Parameter.KEYWORD_ONLY
_table: dict[Any, Lowering] = {}


def taken(call: Call) -> str | None:
    """The check of ops that are taken whatever their arguments are."""
    return None


def lowers(*targets: Any, refuses: Check = taken, takes_rows: bool = False) -> Callable[[Build], Build]:
    """Register the decorated function as the lowering of these ops, or Python functions on sizes."""

    def register(build: Build) -> Build:
        for target in targets:
            if target in _table:
                raise ValueError(f"{target} has two lowerings")
            _table[target] = Lowering(build, refuses, takes_rows)
        return build

    return register


def lowering(target: Any) -> Lowering | None:
    """The lowering of an op; None where there is none."""
    return _table.get(target)


def refusal(call: Call) -> str | None:
    """Why a call is not taken; None where it is."""
    found = _table.get(call.target)
    if found is None:
        return f"no lowering for {call.name}"
    for value in pytree.tree_leaves((list(map(call.fake, call.given)), call.result)):
        if isinstance(value, Tensor) and (reason := dtypes.refusal(value.dtype)) is not None:
            return reason
    if any(fixed_size(size) == 0 for shape in not_empty(call) for size in shape):
        return without_elements(call.name)
    return found.refuses(call)


_aten = torch.ops.aten
_EXTREMES = (_aten.amax, _aten.amin, _aten.max, _aten.min, _aten.argmax, _aten.argmin, _aten.aminmax)
_REDUCED = (*_EXTREMES, _aten.logsumexp, _aten.var, _aten.std, _aten.var_mean, _aten.std_mean)


def not_empty(call: Call) -> Iterator[Sequence[Any]]:
    """Sizes that must not be 0, where OpenVINO would give what lay in its memory, or end the process.

    Over no keys attention is zeros in torch, and so is a product over nothing, which goes wrong with weights; of no
    elements there is no extreme, and torch raises; their deviation, which ends the process behind another op, is NaN.
    """
    packet = getattr(call.target, "overloadpacket", None)
    if packet is _aten.scaled_dot_product_attention:
        yield call.fake("key").shape[-2:-1]
    elif (name := first_factor(packet, call.given)) is not None:
        yield [size for size in call.fake(name).shape[-1:] if fixed_size(size) is not None]
    elif packet in _REDUCED and call.target not in (_aten.max.other, _aten.min.other):
        shape, dim = call.fake("self").shape, call.given.get("dim")
        dims = dim if isinstance(dim, (list, tuple)) and dim else [dim]
        if shape:
            yield shape if dims == [None] or dim == [] else [shape[one] for one in dims]
