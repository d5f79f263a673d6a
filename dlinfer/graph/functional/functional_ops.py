"""The functional form of an op that writes: it takes the same arguments and returns the new contents.

``aten.add_.Tensor`` has ``aten.add.Tensor``. An op outside ATen that declares its writes, such as
``dlinfer::fill_kv_cache``, gets a functional op in the namespace ``dlinfer_values``. That returns the op's results,
then the new content of each written argument. Engines lower it. In torch it copies the arguments and calls the op.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.library import Library, register_fake

from dlinfer.graph.ir.dialect import (
    arguments,
    out_of_place,
    overload,
    parameters_of,
    reshapes_argument,
    written_arguments,
)
from dlinfer.graph.torch_private.dispatcher import OpOverload

NAMESPACE = "dlinfer_values"

_library = Library(NAMESPACE, "DEF")
_defined: dict[OpOverload, OpOverload] = {}
_lock = threading.Lock()

_COPIES = frozenset({"aten::copy_"})


@dataclass(frozen=True)
class FunctionalCall:
    """The functional call that replaces a writing node.

    op: None for a copy, whose new content is the source in the target's dtype and sizes.
    targets: the nodes whose memory is written, in the order of their new contents among the results.
    results: how many results of the op itself come before the contents.
    listed: whether the call returns a sequence, and not one tensor.
    """

    op: OpOverload | None
    targets: Sequence[fx.Node]
    results: int
    listed: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def functional_call(node: fx.Node) -> FunctionalCall | str:
    """The functional form of a node that writes, or why it has none."""
    op = overload(node)
    if op is None:
        return f"{node.target} calls a graph that writes"
    targets = written_arguments(node)
    if reshapes_argument(node):
        return f"{op} changes what memory a tensor is"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return f"{op} draws random numbers"
    if op._schema.name in _COPIES:
        return FunctionalCall(None, targets, 0, False, (node.args[1],), {})
    declared = [parameter for parameter in op._schema.arguments if _writes(parameter)]
    if len(declared) != len(targets):
        return f"{op} writes into a list of tensors, or into one that its schema does not name"
    if op.namespace != "aten":
        own = len(op._schema.returns)
        by_name = arguments(node)
        args = tuple(by_name[parameter.name] for parameter in op._schema.arguments)
        return FunctionalCall(functional_op(op), targets, own, own + len(targets) > 1, args, {})
    if declared[0].kwarg_only:
        return _without_out(node, op, targets)
    return _functional(node, op, targets)


def _functional(node: fx.Node, op: OpOverload, targets: Sequence[fx.Node]) -> FunctionalCall | str:
    functional = out_of_place(op)
    if functional is None or len(targets) != 1:
        return f"{op} has no functional functional"
    return FunctionalCall(functional, targets, 0, False, tuple(node.args), dict(node.kwargs))


def _without_out(node: fx.Node, op: OpOverload, targets: Sequence[fx.Node]) -> FunctionalCall | str:
    """``aten.add.Tensor`` for ``aten.add.out``."""
    parameters = [
        kind
        for kind, parameter in zip(parameters_of(op), op._schema.arguments, strict=True)
        if not _writes(parameter)
    ]
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::"), None)
    for name in packet.overloads() if packet is not None else ():
        functional = getattr(packet, name)
        if parameters_of(functional) == parameters and len(functional._schema.returns) == len(targets):
            inputs = [parameter.name for parameter in op._schema.arguments if not _writes(parameter)]
            by_name = arguments(node)
            kwargs = {key: by_name[key] for key in inputs if key in by_name}
            return FunctionalCall(functional, targets, 0, len(targets) > 1, (), kwargs)
    return f"{op} has no functional functional"


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def functional_op(op: OpOverload) -> OpOverload:
    """The functional op in ``dlinfer_values``, defined at first use."""
    with _lock:  # torch takes a definition once
        if op not in _defined:
            _defined[op] = _define(op)
        return _defined[op]


def _define(op: OpOverload) -> OpOverload:
    schema = op._schema
    name = f"{schema.name.replace('::', '_')}{'_' if op._overloadname != 'default' else ''}"
    name += "" if op._overloadname == "default" else op._overloadname
    written = [index for index, parameter in enumerate(schema.arguments) if _writes(parameter)]
    returns = ", ".join(
        [*(str(parameter.type) for parameter in schema.returns), *("Tensor" for _ in written)]
    )
    _library.define(f"{name}({_parameters(schema)}) -> ({returns})", tags=(torch.Tag.pt2_compliant_tag,))

    def run(*args: Any) -> Any:
        copies = [value.clone() if index in written else value for index, value in enumerate(args)]
        return _joined(op(*copies), len(schema.returns), [copies[index] for index in written])

    def shapes(*args: Any) -> Any:
        fresh = [torch.empty_like(args[index], memory_format=torch.contiguous_format) for index in written]
        return _joined(op(*args), len(schema.returns), fresh)

    _implement(name, run, shapes)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _implement(name: str, run: Callable[..., object], shapes: Callable[..., object]) -> None:
    _library.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{name}", shapes, lib=_library)


_ALIAS = re.compile(r"\(\w+!?\)")


def _parameters(schema: object) -> str:
    """The schema's parameters, without alias annotations and all positional."""
    text = str(schema).partition("(")[2].rpartition(") -> ")[0]
    return _ALIAS.sub("", text).replace("*, ", "")


def _joined(results: Any, own: int, contents: list[torch.Tensor]) -> Any:
    first = [] if own == 0 else [results] if own == 1 else list(results)
    everything = [*first, *contents]
    return everything[0] if len(everything) == 1 else tuple(everything)
