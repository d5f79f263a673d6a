"""Ops that ONNX Runtime computes wrongly if an operand is empty, that is, without elements.

It raises an error, or it returns zeros where torch returns NaN or raises. If a node of such an op has an operand that
is empty in every call, torch runs the node. If an operand may be empty, each call checks the operand's sizes. Pointwise
ops and ops that move elements are right for empty operands. Matrix products are right too, unless the dimension that
they sum over is empty. Fused with other nodes, such a product returns uninitialised memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dlinfer.graph.engine_kit.empty_operands import first_factor, without_elements
from dlinfer.graph.ir.dialect import arguments, fake, is_view, op_name, overload
from dlinfer.graph.torch_private.symbols import fixed_size

_RIGHT = frozenset(
    f"aten::{name}"
    for name in (
        *"cat concat stack clone contiguous copy to _to_copy type_as expand repeat flip detach".split(),
        *"linear matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention softmax log_softmax".split(),
        *"embedding index_select index slice_scatter select_scatter masked_fill where tril triu".split(),
        *"full_like zeros_like ones_like new_zeros new_ones new_full new_empty empty_like".split(),
        *"constant_pad_nd pad".split(),
    )
)
_INTO = frozenset(
    f"aten::{name}" for name in "index_copy index_put index_add scatter scatter_add scatter_reduce".split()
)
"""Ops that write into a tensor ``self`` at an index.

If ``self`` is empty there is nothing to write, but ONNX Runtime checks the index and raises. It also raises for an
empty index whose shape differs from ``self``'s, as it does in ``gather``.
"""
_MODULO = frozenset(f"aten::{name}" for name in "remainder fmod div".split())
"""Ops that raise in ONNX Runtime for an integer divisor of 0, even if the dividend has no elements."""
_WRONG = frozenset({"dlinfer::fused_moe"})
_OVER_LAST = frozenset({"dlinfer::rms_norm", "dlinfer::add_rms_norm", "aten::rms_norm", "aten::layer_norm"})
"""Ops that normalise each row of an operand. The operand may have no rows, but its rows must have elements."""


def refusal(node: fx.Node) -> str | None:
    """Return a reason to refuse a node, if a size that ``shapes`` yields is 0 in every call; else None."""
    if any(fixed_size(size) == 0 for shape in shapes(node) for size in shape):
        return without_elements(op_name(node))
    return None


def shapes(node: fx.Node) -> Iterator[Sequence[Any]]:
    """Yield groups of sizes of a node's operands. None of these sizes may be 0 in a call to ONNX Runtime.

    With a size of 0, ONNX Runtime would compute the node wrongly.
    """
    op = overload(node)
    if op is None:
        return
    name = op._schema.name.rstrip("_")
    right = (
        (op.namespace != "aten" and name not in _WRONG) or torch.Tag.pointwise in op.tags or name in _RIGHT
    )
    operands = [operand for operand in node.all_input_nodes if isinstance(fake(operand), Tensor)]
    if name in _OVER_LAST:
        lengths = arguments(node).get("normalized_shape", (1,))
        yield fake(operands[0]).shape[-len(lengths) :]
    elif name in _MODULO and len(operands) > 1 and not fake(node).is_floating_point():
        yield from (fake(operand).shape for operand in operands)
    elif name in ("aten::chunk", "aten::unsafe_chunk", "aten::split", "aten::unsafe_split"):
        yield (fake(operands[0]).shape[arguments(node)["dim"]],)
    elif name in _INTO:
        yield fake(arguments(node)["self"]).shape
        if isinstance(index := arguments(node).get("index"), fx.Node):
            yield fake(index).shape
    elif name == "aten::gather":
        yield fake(arguments(node)["index"]).shape
    elif (factor := first_factor(op.overloadpacket, arguments(node))) is not None:
        yield fake(arguments(node)[factor]).shape[-1:]
    elif not right and not is_view(node):
        yield from (fake(operand).shape for operand in operands)
