"""Edit a graph so that ONNX's ops compute the same as torch's ops.

- ONNX's elementwise ops take operands of the same type. ``promote`` inserts the casts of torch's type promotion.
- ONNX counts negative indices from the end in every op, but some ops of torch refuse them. ``refuse_negative`` makes
  ONNX raise in these ops too.
"""

from collections.abc import Mapping

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments, fake, overload, schema_name
from dlinfer.graph.torch_private.dispatcher import OpOverload
from dlinfer.graph.torch_private.fake_mode import mode_of

_aten = torch.ops.aten

BEHIND = 2**31 - 1
"""The highest int32: an index beyond the end of every shorter dimension. ONNX Runtime's kernels refuse it."""

_CHOOSERS = {"aten::where": "condition", "aten::masked_fill": "mask"}
"""Op -> the operand that selects among the others, and takes no part in type promotion."""

_OWN_DTYPE = frozenset(
    {"aten::_to_copy", "aten::to", "aten::copy", "aten::bitwise_left_shift", "aten::bitwise_right_shift"}
)
"""Elementwise ops that have a dtype argument or do not promote their operands."""

_ACCUMULATING = frozenset({"aten::cumsum", "aten::sum", "aten::prod"})
"""Reductions and scans that compute in the dtype of their result, which is int64 for bools and small integers."""

_LOSSES = (
    "cross_entropy_loss",
    "nll_loss",
    "nll_loss2d",
    "nll_loss_nd",
    "nll_loss_forward",
    "nll_loss2d_forward",
)
_INDEXING = ("gather", "index_add", "index_copy", "index_select", "scatter", "scatter_add", "scatter_reduce")
_FROM_THE_FRONT: Mapping[str, str] = {
    "aten::embedding": "indices",
    **{f"aten::{name}": "index" for name in _INDEXING},
    **{f"aten::{name}": "target" for name in _LOSSES},
    "dlinfer::fused_moe": "topk_ids",
}
"""Op -> its index parameter. In torch, the op raises for a negative index that is not the ``ignore_index``."""


def promote(graph: fx.Graph) -> None:
    """Insert the casts that torch does inside its elementwise ops and in sum, prod and cumsum. Changes ``graph``."""
    for node in list(graph.nodes):
        op = overload(node)
        if op is None:
            continue
        name, call = schema_name(node), arguments(node)
        operands = [
            value
            for parameter, value in call.items()
            if isinstance(value, fx.Node)
            and isinstance(fake(value), (torch.Tensor, torch.SymInt, torch.SymFloat))
            and parameter != _CHOOSERS.get(name)
        ]
        dtype = None
        if name in _ACCUMULATING:
            dtype, operands = fake(node).dtype, [call["self"]]
        elif torch.Tag.pointwise in op.tags and name not in _OWN_DTYPE:
            dtype = _promoted(node, operands)
        for operand in operands:
            if dtype is not None and getattr(fake(operand), "dtype", None) != dtype:
                _cast(node, operand, dtype)


def _promoted(node: fx.Node, operands: list[fx.Node]) -> torch.dtype | None:
    """Return the dtype that an elementwise node computes in; None if its operands need no cast."""
    tensors = [value for value in map(fake, operands) if isinstance(value, torch.Tensor)]
    result = fake(node)
    if not isinstance(result, torch.Tensor) or not tensors:
        return None
    if result.dtype != torch.bool:
        return result.dtype
    dtype = torch.result_type(tensors[0], tensors[-1])
    for number in arguments(node).values():
        if isinstance(number, (int, float)):
            dtype = torch.result_type(torch.empty(1, dtype=dtype), number)
    return dtype


def _cast(node: fx.Node, operand: fx.Node, dtype: torch.dtype) -> None:
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(_aten._to_copy.default, (operand,), {"dtype": dtype})
    shape = fake(operand).shape if isinstance(fake(operand), torch.Tensor) else ()
    with mode_of([fake(node)]):
        cast.meta = {"val": torch.empty(shape, dtype=dtype), "nn_module_stack": {}}
    node.replace_input_with(operand, cast)


def refuse_negative(graph: fx.Graph) -> None:
    """Replace negative indices by ``BEHIND`` in ops that refuse negative indices in torch. This changes ``graph``.

    ``BEHIND`` is an index past the end of every dimension, which ONNX Runtime refuses too.
    """
    replaced: dict[tuple[fx.Node, int | None], fx.Node] = {}
    for node in list(graph.nodes):
        name = _FROM_THE_FRONT.get(schema_name(node))
        if name is None:
            continue
        call = arguments(node)
        index, ignored = call[name], call.get("ignore_index")
        if fake(index).is_floating_point():  # probabilities, as cross_entropy_loss takes them too
            continue
        if (index, ignored) not in replaced:
            replaced[index, ignored] = _behind(index, ignored)
        node.replace_input_with(index, replaced[index, ignored])


def _behind(index: fx.Node, ignored: int | None) -> fx.Node:
    after = index.next
    while after.op == "placeholder":
        after = after.next
    negative = insert_call(after, _aten.lt.Scalar, index, 0)
    if ignored is not None and ignored < 0:
        counted = insert_call(after, _aten.ne.Scalar, index, ignored)
        negative = insert_call(after, _aten.logical_and.default, negative, counted)
    return insert_call(after, _aten.masked_fill.Scalar, index, negative, BEHIND)


def insert_call(before: fx.Node, op: OpOverload, *args: fx.Node | float) -> fx.Node:
    """Insert and return a call before a node. The op runs on the fakes of its arguments."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(op, args)
    values = [fake(value) if isinstance(value, fx.Node) else value for value in args]
    with mode_of(values):
        node.meta["val"] = op(*values)
    return node
