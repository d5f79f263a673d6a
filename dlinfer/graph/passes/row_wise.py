"""List the ops that work row by row: a row of their result depends only on the same row of their arguments.

A row is a slice at one index of a dimension, such as a token of the hidden states [1, N, H] or [N, H]. The lists have
the ops that occur between attention and the end of a model. All other ops are assumed to mix rows.
"""

import operator

import torch
from torch import Tensor, fx

from dlinfer.graph.ir.dialect import arguments, fake, nodes_in, op_name, overload, tensor_or_none
from dlinfer.graph.ir.layout import same_size, same_sizes

# Op -> the arguments that have the result's rows. A row of these ops extends to the end of the last dimension.
_BY_NAME: dict[str, tuple[str, ...]] = {
    "aten.linear": ("input",),
    **dict.fromkeys(("aten.to.dtype", "aten._to_copy"), ("self",)),
    **{
        f"dlinfer.{name}": ("x",)
        for name in (
            *("linear", "linears", "linear_bf12", "linear_gguf", "linear_blocked_fp8", "linear_static_fp8"),
            *("linear_w8a8_static", "weight_quant_matmul", "dynamic_quant"),
            *("rms_norm", "rms_norm_w8a8", "silu_and_mul"),
        )
    },
    "dlinfer.linear_w8a8": ("a", "rms_scale"),
    "dlinfer.lora_linear": ("base", "x", "adapter_ids"),
    **dict.fromkeys(("dlinfer.add_rms_norm", "dlinfer.add_rms_norm_w8a8"), ("x", "residual")),
    **dict.fromkeys(("dlinfer.silu_mul", "dlinfer.gelu_mul"), ("gate", "up")),
    "dlinfer.moe_gating_topk_softmax": ("router_logits",),
    **{
        f"dlinfer.fused_moe{kind}": ("hidden_states", "topk_weights", "topk_ids")
        for kind in (
            *("", "_bf12", "_blocked_fp8", "_clamped", "_gguf", "_limited", "_limited_mxfp4", "_mxfp4"),
            *("_static_fp8", "_w4a16", "_w8a8"),
        )
    },
}
# Ops that work along the dimension ``dim`` of ``self``, and so mix the rows of that dimension only.
_ALONG_DIM = frozenset(f"aten.{name}" for name in ("slice.Tensor", "split_with_sizes", "softmax.int", "topk"))
_RESHAPING = frozenset(
    f"aten.{name}" for name in "view reshape flatten.using_ints unflatten.int squeeze.dim unsqueeze".split()
)

Rows = dict[fx.Node, int]
"""Node -> the dimension of its result that counts rows."""


def rows_of_arguments(node: fx.Node, dim: int) -> Rows | None:
    """Return the arguments that a node reads row by row: row i of the result needs only row i of these arguments.

    The result maps each argument to the dimension that counts its rows. It is None if the node needs other rows too.
    dim: the dimension of the node's result, or of each result, that counts rows. It is not negative.
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
        call = arguments(node)
        read = [call[parameter] for parameter in _BY_NAME[name]]
        others = [value for parameter, value in call.items() if parameter not in _BY_NAME[name]]
        is_read_whole = not set(nodes_in(others)).isdisjoint(nodes_in(read))
        return None if is_read_whole else _all_have(node, dim, read)
    if name in _ALONG_DIM:
        call = arguments(node)
        is_along = call["dim"] % fake(call["self"]).dim() == dim
        return None if is_along else _all_have(node, dim, [call["self"]], ends_last=False)
    if torch.Tag.pointwise in op.tags:
        return _broadcast(node, dim)
    return None


def reshapes_rows(node: fx.Node) -> bool:
    """Return whether a node returns its argument's elements in their order, in another shape."""
    return op_name(node) in _RESHAPING


def _results(node: fx.Node) -> list[Tensor]:
    value = fake(node)
    return [value] if isinstance(value, Tensor) else list(value)


def _all_have(node: fx.Node, dim: int, read: list[fx.Node], *, ends_last: bool = True) -> Rows | None:
    """Return the arguments ``read``, if they and the results all count rows in dimension ``dim``; else None.

    ends_last: whether a row includes the last dimension. If so, ``dim`` must not be the last dimension of ``read[0]``.
    """
    if any(tensor_or_none(argument) is None for argument in read):
        return None
    tensors = [*_results(node), *map(fake, read)]
    rows = tensors[0].shape[dim]
    if any(tensor.dim() <= dim or not same_size(tensor.shape[dim], rows) for tensor in tensors):
        return None
    if ends_last and dim == fake(read[0]).dim() - 1:
        return None
    return dict.fromkeys(read, dim)


def _broadcast(node: fx.Node, dim: int) -> Rows | None:
    """Return the arguments of a pointwise op that have the result's rows.

    Arguments that are broadcast over rows are left out. Return None if an argument has another number of rows, or if no
    argument has rows.
    """
    result = fake(node)
    if not isinstance(result, Tensor):
        return None
    rows: Rows = {}
    for parent in node.all_input_nodes:
        value = fake(parent)
        if not isinstance(value, Tensor):
            continue
        at = dim - (result.dim() - value.dim())
        if at < 0 or (same_size(value.shape[at], 1) and not same_size(result.shape[dim], 1)):
            continue
        if not same_size(value.shape[at], result.shape[dim]):
            return None
        rows[parent] = at
    return rows or None


def _reshaped(node: fx.Node, dim: int) -> Rows | None:
    """Return the argument of a reshape, and the dimension of the argument that counts the rows of the result.

    Return None if no dimension of the argument does. The dimensions before the rows must be equal in argument and
    result, or all 1.
    """
    result, parent = fake(node), arguments(node)["self"]
    value = fake(parent)
    others = [size for at, size in enumerate(result.shape) if at != dim]
    if not all(isinstance(size, int) and size > 0 for size in others):
        return None
    for at, size in enumerate(value.shape):
        before = value.shape[:at], result.shape[:dim]
        is_first = all(same_size(outer, 1) for sizes in before for outer in sizes)
        if same_size(size, result.shape[dim]) and (is_first or same_sizes(*before)):
            return {parent: at}
    return None
