"""Find the functional form of an op that writes: an op that returns the new contents instead.

For ``aten.add_.Tensor`` this is ``aten.add.Tensor``. An op outside ATen that declares its writes, such as
``dlinfer::fill_kv_cache``, gets a functional op in the namespace ``dlinfer_values``. The functional op returns the
results of the original op, then the new content of each written argument. Engines lower the functional op. If torch
runs it, it copies the written arguments and calls the original op.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from dlinfer.graph.ir.dialect import (
    arguments,
    is_random,
    out_of_place,
    overload,
    reshapes_argument,
    signature,
    written_arguments,
    written_parameters,
)
from dlinfer.graph.ir.own_ops import define_op, torch_library
from dlinfer.graph.torch_private.dispatcher import Op, is_op, parameters_of, schema_of

NAMESPACE = "dlinfer_values"

_library = torch_library.Library(NAMESPACE, "DEF")
_defined: dict[Op, Op] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class FunctionalCall:
    """The functional call that replaces a node that writes.

    op: the functional op. None if the node calls ``copy_``: then no op is needed, because the new content is
        ``copy_``'s source in the target's dtype and sizes.
    targets: the nodes whose memory is written. The call returns their new contents in this order.
    args, kwargs: the functional op's arguments.
    results: the number of results that the original op has. The functional op returns them before the new contents.
    """

    op: Op | None
    targets: Sequence[fx.Node]
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    results: int = 0

    @property
    def listed(self) -> bool:
        """Whether the call returns a sequence, and not one tensor."""
        return self.results + len(self.targets) > 1


def functional_call(node: fx.Node) -> FunctionalCall | str:
    """Return the functional form of a node that writes. If it has none, return the reason as a text."""
    op = overload(node)
    if op is None:
        return f"{node.target} calls a graph that writes"
    targets = written_arguments(node)
    if reshapes_argument(node):
        return f"{op} changes the storage or the sizes of a tensor"
    if is_random(node):
        return f"{op} draws random numbers"
    if op is torch.ops.aten.copy_.default:
        return FunctionalCall(None, targets, (node.args[1],), {})
    written = written_parameters(op)
    if len(written) != len(targets):
        return f"{op} writes into a list of tensors, or into a tensor that its schema does not declare"
    by_name = arguments(node)
    if op.namespace != "aten":
        args = tuple(by_name[parameter.name] for parameter in parameters_of(op))
        return FunctionalCall(functional_op(op), targets, args, {}, len(schema_of(op).returns))
    if next(p.kwarg_only for p in parameters_of(op) if p.name in written):
        functional = _without_out(op)
        kwargs = {name: value for name, value in by_name.items() if name not in written}
        call = functional and FunctionalCall(functional, targets, (), kwargs)
    else:
        functional = out_of_place(op) if len(targets) == 1 else None
        call = functional and FunctionalCall(functional, targets, node.args, dict(node.kwargs))
    return call or f"{op} has no functional form"


def _without_out(op: Op) -> Op | None:
    """Return the overload without ``out``, such as ``aten.add.Tensor`` for ``aten.add.out``; None if there is none."""
    written = written_parameters(op)
    packet: Any = op.overloadpacket
    for overload_name in packet.overloads():
        functional = getattr(packet, overload_name)
        is_same = is_op(functional) and signature(functional) == signature(op, without=written)
        if is_same and len(schema_of(functional).returns) == len(written):
            return functional
    return None


def functional_op(op: Op) -> Op:
    """Return the functional op in ``dlinfer_values`` for an op that writes; define it at its first use."""
    with _lock:  # torch takes a definition once
        if op not in _defined:
            _defined[op] = _define(op)
        return _defined[op]


def _define(op: Op) -> Op:
    schema = schema_of(op)
    name = "_".join(filter(None, (schema.name.replace("::", "_"), schema.overload_name)))
    names = [parameter.name for parameter in schema.arguments]
    written = [names.index(parameter) for parameter in written_parameters(op)]
    returns = ", ".join([*(str(parameter.type) for parameter in schema.returns), *["Tensor"] * len(written)])

    def run(*args: Any) -> object:
        copies = [value.clone() if index in written else value for index, value in enumerate(args)]
        return _joined(op(*copies), len(schema.returns), [copies[index] for index in written])

    def shapes(*args: Any) -> object:
        fresh = [torch.empty_like(args[index], memory_format=torch.contiguous_format) for index in written]
        return _joined(op(*args), len(schema.returns), fresh)

    return define_op(_library, name, f"({_parameters(schema)}) -> ({returns})", run, shapes)


def _parameters(schema: object) -> str:
    """Return the text of a schema's parameters without alias annotations. Keyword-only parameters become positional."""
    text = str(schema).partition("(")[2].rpartition(") -> ")[0]
    return re.sub(r"\(\w+!?\)", "", text).replace("*, ", "")


def _joined(results: Any, own: int, contents: list[torch.Tensor]) -> object:
    first = [] if own == 0 else [results] if own == 1 else list(results)
    everything = [*first, *contents]
    return everything[0] if len(everything) == 1 else tuple(everything)
