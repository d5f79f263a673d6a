"""The dialect of captured graphs, and queries about its nodes.

A graph in the dialect is an ``fx.GraphModule`` of ATen ops before dispatch (``OpOverload``), dlinfer's ops and
arithmetic on symbolic sizes, for inference. Writes stay in place, so order matters: a node must not move across a write
to memory that the node reads. ``meta["val"]`` of a node is its fake result. Fakes that share a storage are views of the
same memory.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.node import Argument, map_arg
from torch.utils import _pytree as pytree

from dlinfer.graph.torch_private.dispatcher import (
    HigherOrderOperator,
    Op,
    has_registered_effect,
    is_op,
    parameters_of,
    schema_of,
)
from dlinfer.graph.torch_private.fake_mode import storage_id
from dlinfer.graph.torch_private.symbols import plain_symbol, symbols_of

STATIC = "static_input"
"""The key in a placeholder's meta that marks a module's parameter or buffer: the same tensor at each call."""

# Op -> its flag: if the flag is true, the op updates running statistics, which torch's schema does not declare.
_UPDATES_STATISTICS = {
    "aten::batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::_batch_norm_impl_index": "training",
    "aten::native_batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
}

# Op -> its flag: the op is random only if the flag is true. torch tags other random ops ``nondeterministic_seeded``.
_RANDOM_IN_TRAINING = {
    "aten::dropout": "train",
    "aten::feature_dropout": "train",
    "aten::alpha_dropout": "train",
    "aten::feature_alpha_dropout": "train",
    "aten::rrelu": "training",
    "aten::scaled_dot_product_attention": "dropout_p",
}

_SCHEMA_TELLS_ALL = frozenset({"aten", "prims", "dlinfer", "dlinfer_graph", "dlinfer_values"})
"""Namespaces of ops whose schemas and tags declare all effects."""
_WITHOUT_STATE = frozenset({"torchvision", "quantized", "quantized_decomposed", "transformers"})
"""Namespaces of other libraries whose sources show no undeclared effects. Ops registered as effectful do have some."""

_REPLACES_MEMORY = frozenset({"set_", "resize_", "resize_as_", "as_strided_"})

SYMBOLIC_FUNCTIONS = "sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum".split()
_PURE_PYTHON: frozenset[object] = frozenset(
    (
        *(value for name, value in vars(operator).items() if not name.startswith("_")),
        *(getattr(torch, name) for name in SYMBOLIC_FUNCTIONS),
        *(math.ceil, math.floor, math.trunc, round, getattr),
    )
)


def fake(node: fx.Node) -> Any:
    """Return a node's fake result: a tensor, a symbolic or plain number, or a sequence of these."""
    return node.meta.get("val")


def tensor_or_none(value: object) -> torch.Tensor | None:
    """Return the fake result of ``value`` if it is a node whose result is one tensor; else None."""
    result = fake(value) if isinstance(value, fx.Node) else None
    return result if isinstance(result, torch.Tensor) else None


def tensor_of(node: fx.Node) -> torch.Tensor:
    """Return a node's fake result, which must be one tensor."""
    value = tensor_or_none(node)
    assert value is not None, node.format_node()
    return value


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(fake(node)) if isinstance(leaf, torch.Tensor)]


def storages(node: fx.Node) -> set[int]:
    """Return the storage ids of the strided tensors in a node's result."""
    return {storage_id(tensor) for tensor in tensors_of(node) if tensor.layout == torch.strided}


def memory_read(node: fx.Node) -> frozenset[int]:
    return frozenset(memory for parent in node.all_input_nodes for memory in storages(parent))


def overload(node: fx.Node) -> Op | None:
    """Return the op that a node calls; None for other nodes, such as arithmetic on sizes and placeholders."""
    return node.target if is_op(node.target) else None


def schema_name(node: fx.Node) -> str:
    """Return the name in a node's op schema: ``aten::add`` for ``aten.add.Tensor``. Empty if the node calls no op."""
    op = overload(node)
    return "" if op is None else schema_of(op).name


def op_name(node: fx.Node) -> str:
    """Return the name of a node's op or function: ``aten.add.Tensor``, ``dlinfer.rms_norm``, ``operator.mul``.

    For other nodes, return their kind, such as ``placeholder``.
    """
    op = overload(node)
    if op is not None:
        return str(op).removesuffix(".default")
    if node.op != "call_function":
        return node.op
    module: str = getattr(node.target, "__module__", "") or ""
    return f"{module.removeprefix('_')}.{getattr(node.target, '__name__', node.target)}"


def has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    op = overload(node)
    return op is not None and tag in op.tags


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return parameter name -> argument for the op that a node calls, defaults included."""
    op = overload(node)
    assert op is not None, node.format_node()
    by_name: dict[str, Any] = {}
    for index, parameter in enumerate(parameters_of(op)):
        if parameter.name in node.kwargs:
            by_name[parameter.name] = node.kwargs[parameter.name]
        elif not parameter.kwarg_only and index < len(node.args):
            by_name[parameter.name] = node.args[index]
        elif parameter.has_default_value():
            by_name[parameter.name] = parameter.default_value
    return by_name


@functools.cache
def written_parameters(op: Op) -> tuple[str, ...]:
    """Return the names of the parameters that the op's schema declares as written."""
    return tuple(p.name for p in parameters_of(op) if p.alias_info is not None and p.alias_info.is_write)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments whose memory this node writes.

    For a higher-order op with a branch that writes, these are all its tensor operands.
    """
    op = overload(node)
    if op is None:
        if not isinstance(node.target, HigherOrderOperator) or not any(map(_writes, _called_graphs(node))):
            return []
        return [parent for parent in node.all_input_nodes if tensors_of(parent)]
    names, flag = written_parameters(op), _UPDATES_STATISTICS.get(schema_name(node))
    if not names and flag is None:
        return []
    call = arguments(node)
    if flag is not None and call[flag]:
        names = (*names, "running_mean", "running_var")
    return [leaf for name in names for leaf in nodes_in(call.get(name))]


def _called_graphs(node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield the graphs that a higher-order op calls. They are attributes of the module that owns the node's graph."""
    for parent in node.all_input_nodes:
        if parent.op == "get_attr":
            owner = parent.graph.owning_module
            assert owner is not None, "a graph that calls other graphs belongs to a module that holds them"
            value = attribute(owner, str(parent.target))
            if isinstance(value, fx.GraphModule):
                yield value


def _writes(graph_module: fx.GraphModule) -> bool:
    return any(written_arguments(node) for node in graph_module.graph.nodes)


def attribute(graph_module: fx.GraphModule, target: str) -> Any:
    return operator.attrgetter(target)(graph_module)


def out_of_place(op: Op) -> Op | None:
    """Return the op with the same parameters and no write: ``aten.div.Tensor`` for ``aten.div_.Tensor``.

    Return None if there is no such op, or if the op replaces its argument's memory, as ``set_`` does.
    """
    schema = schema_of(op)
    name = schema.name.removeprefix("aten::")
    if op.namespace != "aten" or not name.endswith("_") or name in _REPLACES_MEMORY:
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    functional = getattr(packet, schema.overload_name or "default", None)
    return functional if is_op(functional) and signature(functional) == signature(op) else None


def signature(op: Op, without: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return a pair (name, type) for each parameter of an op, except those in ``without``."""
    return [(p.name, str(p.type)) for p in parameters_of(op) if p.name not in without]


def nodes_in(argument: Argument) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    map_arg(argument, nodes.append)
    return nodes


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers. Random draws must stay in order."""
    flag = _RANDOM_IN_TRAINING.get(schema_name(node))
    if flag is not None:
        return bool(arguments(node).get(flag))
    return has_tag(node, torch.Tag.nondeterministic_seeded)


def has_hidden_effects(node: fx.Node) -> bool:
    """Return whether a node's op may have effects that its schema does not declare: a counter, noise, a queue.

    Ops of libraries that this module does not list are assumed to have such effects. So a compiled graph runs them as
    often as the model does, and in the same order.
    """
    op = overload(node)
    if op is None or op.namespace in _SCHEMA_TELLS_ALL:
        return False
    return op.namespace not in _WITHOUT_STATE or has_registered_effect(op)


def is_pure(node: fx.Node) -> bool:
    """Return whether a node only computes its result, so that DCE may drop it and CSE may merge it."""
    if node.op != "call_function":
        return node.op == "get_attr"
    if overload(node) is None:
        return node.target in _PURE_PYTHON
    if has_hidden_effects(node) or written_arguments(node) or is_random(node):
        return False
    # An op without a result is called for an effect: an assertion, a message, a write.
    return gives_something(node)


def gives_something(node: fx.Node) -> bool:
    """Return whether an op has a result. Assertions and some writes have none."""
    op = overload(node)
    return op is None or len(schema_of(op).returns) > 0


def is_view(node: fx.Node) -> bool:
    """Return whether a node is pure and its result lies in memory of its arguments."""
    memory = storages(node)
    return bool(memory) and memory <= memory_read(node) and is_pure(node)


def is_size(node: fx.Node) -> bool:
    """Return whether a node's result is a number, such as a size."""
    return isinstance(fake(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def reads_number(node: fx.Node) -> bool:
    """Return whether a node reads a number from a tensor's memory, as ``item`` does."""
    return overload(node) is not None and is_size(node) and not schema_name(node).startswith("aten::sym_")


def brings_symbol(node: fx.Node) -> bool:
    """Return whether a node creates an unbacked symbol: a number or size that depends on data (item, nonzero)."""
    if has_tag(node, torch.Tag.dynamic_output_shape):  # only some calls: index by a mask, but not by integers
        return not symbols_in(node) <= {symbol for p in node.all_input_nodes for symbol in symbols_in(p)}
    return reads_number(node) or has_tag(node, torch.Tag.data_dependent_output)


def symbols_in(node: fx.Node) -> set[object]:
    return {symbol for leaf in pytree.tree_leaves(fake(node)) for symbol in symbols_of(leaf)}


def input_with(symbol: object, inputs: Sequence[fx.Node]) -> fx.Node | tuple[fx.Node, int] | None:
    """Return an input whose value is the symbol, or else a pair (input, dimension) whose size is the symbol.

    Return None if no input has this value or size.
    """
    for node in inputs:
        if plain_symbol(fake(node)) == symbol:
            return node
    for node in inputs:
        tensor = tensor_or_none(node)
        for dim, size in enumerate(() if tensor is None else tensor.shape):
            if plain_symbol(size) == symbol:
                return node, dim
    return None


def reshapes_argument(node: fx.Node) -> bool:
    """Return whether a node changes sizes or memory of an argument in place, as ``t_`` and ``set_`` do."""
    return has_tag(node, torch.Tag.inplace_view)


def is_as_strided(node: fx.Node) -> bool:
    return schema_name(node).startswith("aten::as_strided")


def placed_memory(node: fx.Node) -> set[int]:
    """Return the memory that a node reads at a fixed storage offset, as ``as_strided`` with an offset does.

    If an input owns this memory, the node is right only for inputs with the storage offset of the captured call.
    """
    if not is_as_strided(node):
        return set()
    call = arguments(node)
    return set() if call["storage_offset"] is None else storages(call["self"])


def call_on_fakes(op: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Run an op on fakes and return its result. An op such as ``t_`` leaves the sizes of the given fakes unchanged."""
    if torch.Tag.inplace_view in getattr(op, "tags", ()):
        args = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
    return op(*args, **kwargs)


def is_compute(node: fx.Node) -> bool:
    """Return whether a node computes on tensor values. Views and arithmetic on sizes do not."""
    if node.op != "call_function" or node.target is operator.getitem or is_size(node):
        return False
    return not is_view(node)


def model_source(node: fx.Node) -> dict[str, object]:
    """Return the part of a node's meta that names its line and module in the model."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def model_line(node: fx.Node) -> str:
    """Return a node's place in the model's code, as ``file:line, in function``; empty if unknown."""
    frames = stack_frames(node)
    return "{}:{}, in {}".format(*frames[-1]) if frames else ""


def stack_frames(node: fx.Node) -> list[tuple[str, str, str]]:
    """Return (file, line, function) for each call that led to a node. The outermost call comes first."""
    trace = node.meta.get("stack_trace") or ""
    return re.findall(r'^\s*File "(.*)", line (\d+), in (.*?)\s*$', trace, re.MULTILINE)


def describe(value: object) -> str:
    """Return a fake result's dtype and sizes as text for people: ``float16[4, s0]``."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if is_list(value):
        return f"({', '.join(map(describe, value))})"
    return str(value)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


class Bare(str):
    """Text whose repr has no quotation marks, so that a list shows it as code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
