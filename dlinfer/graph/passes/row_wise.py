"""Which ops treat each row of what they are given by itself, so that some rows of their result need these rows alone.

A row is what one index of a dimension holds: of hidden states [1, N, H] or [N, H], a token's. Ops are listed that stand
between attention and the end of a model; of any other it is not known, and so not so.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from dlinfer.graph.ir.dialect import arguments, fake, nodes_in, op_name, overload
from dlinfer.graph.ir.layout import same_size, same_sizes

_EXPERTS = ("hidden_states", "topk_weights", "topk_ids")

# Arguments that have the rows of the result, and in which a row ends with the last dimension.
_BY_NAME: dict[str, tuple[str, ...]] = {
    "aten.linear": ("input",),
    "aten.to.dtype": ("self",),
    "aten._to_copy": ("self",),
    "dlinfer.linear": ("x",),
    "dlinfer.linears": ("x",),
    "dlinfer.linear_bf12": ("x",),
    "dlinfer.linear_blocked_fp8": ("x",),
    "dlinfer.linear_static_fp8": ("x",),
    "dlinfer.linear_w8a8": ("a", "rms_scale"),
    "dlinfer.linear_w8a8_static": ("x",),
    "dlinfer.weight_quant_matmul": ("x",),
    "dlinfer.dynamic_quant": ("x",),
    "dlinfer.rms_norm": ("x",),
    "dlinfer.rms_norm_w8a8": ("x",),
    "dlinfer.add_rms_norm": ("x", "residual"),
    "dlinfer.add_rms_norm_w8a8": ("x", "residual"),
    "dlinfer.silu_and_mul": ("x",),
    "dlinfer.silu_mul": ("gate", "up"),
    "dlinfer.gelu_mul": ("gate", "up"),
    "dlinfer.moe_gating_topk_softmax": ("router_logits",),
    "dlinfer.fused_moe": _EXPERTS,
    "dlinfer.fused_moe_bf12": _EXPERTS,
    "dlinfer.fused_moe_blocked_fp8": _EXPERTS,
    "dlinfer.fused_moe_clamped": _EXPERTS,
    "dlinfer.fused_moe_mxfp4": _EXPERTS,
    "dlinfer.fused_moe_static_fp8": _EXPERTS,
    "dlinfer.fused_moe_w4a16": _EXPERTS,
    "dlinfer.fused_moe_w8a8": _EXPERTS,
}
# Ops along one dimension of ``self``, which the argument ``dim`` names.
_ALONG_DIM = frozenset(f"aten.{name}" for name in ("slice.Tensor", "split_with_sizes", "softmax.int", "topk"))
_RESHAPING = frozenset(
    f"aten.{name}" for name in "view reshape flatten.using_ints unflatten.int squeeze.dim unsqueeze".split()
)

Rows = dict[fx.Node, int]
"""Nodes, and the dimension of their result that counts the rows."""


def rows_of_arguments(node: fx.Node, dim: int) -> Rows | None:
    """The arguments of which a node needs just the rows that are asked of its result; None where it needs others too.

    dim: counts the rows of the node's result, of each part where there are several, from the front.
    """
    if node.target is operator.getitem:
        return {node.args[0]: dim} if isinstance(node.args[0], fx.Node) else None
    op = overload(node)
    if op is None:
        return None
    if reshapes_rows(node):
        return _reshaped(node, dim)
    name = op_name(node)
    if name in _BY_NAME:
        given = arguments(node)
        read = [given[one] for one in _BY_NAME[name]]
        others = [value for one, value in given.items() if one not in _BY_NAME[name]]
        is_read_whole = not set(nodes_in(others)).isdisjoint(nodes_in(read))
        return None if is_read_whole else _all_have(node, dim, read)
    if name in _ALONG_DIM:
        given = arguments(node)
        is_along = given["dim"] % fake(given["self"]).dim() == dim
        return None if is_along else _all_have(node, dim, [given["self"]], ends_last=False)
    if torch.Tag.pointwise in op.tags:
        return _broadcast(node, dim)
    return None


def reshapes_rows(node: fx.Node) -> bool:
    """Whether a node gives its argument's elements in their order, in another shape."""
    return op_name(node) in _RESHAPING


def _results(node: fx.Node) -> list[Tensor]:
    value = fake(node)
    return [value] if isinstance(value, Tensor) else list(value)


def _all_have(node: fx.Node, dim: int, read: list[Any], *, ends_last: bool = True) -> Rows | None:
    """The arguments ``read``, if they and the results all count the rows in dimension ``dim``; None where they do not.

    ends_last: a row goes to the end of the first argument's last dimension, which then counts no rows.
    """
    if any(not isinstance(one, fx.Node) or not isinstance(fake(one), Tensor) for one in read):
        return None
    tensors = [*_results(node), *map(fake, read)]
    rows = tensors[0].shape[dim]
    if any(tensor.dim() <= dim or not same_size(tensor.shape[dim], rows) for tensor in tensors):
        return None
    if ends_last and dim == fake(read[0]).dim() - 1:
        return None
    return dict.fromkeys(read, dim)


def _broadcast(node: fx.Node, dim: int) -> Rows | None:
    """Of an op of single elements: its arguments that have the rows; those that are the same for all rows are not."""
    result = fake(node)
    if not isinstance(result, Tensor):
        return None
    found: Rows = {}
    for parent in node.all_input_nodes:
        value = fake(parent)
        if not isinstance(value, Tensor):
            continue
        at = dim - (result.dim() - value.dim())
        if at < 0 or (same_size(value.shape[at], 1) and not same_size(result.shape[dim], 1)):
            continue
        if not same_size(value.shape[at], result.shape[dim]):
            return None
        found[parent] = at
    return found or None


def _reshaped(node: fx.Node, dim: int) -> Rows | None:
    """Of an op that reshapes: where its argument counts the rows, if nothing but ones, or the same, is before them."""
    result, parent = fake(node), arguments(node)["self"]
    value = fake(parent)
    others = [size for at, size in enumerate(result.shape) if at != dim]
    if not all(isinstance(size, int) and size > 0 for size in others):
        return None
    for at, size in enumerate(value.shape):
        before = value.shape[:at], result.shape[:dim]
        is_first = all(same_size(one, 1) for sizes in before for one in sizes)
        if same_size(size, result.shape[dim]) and (is_first or same_sizes(*before)):
            return {parent: at}
    return None
