"""Mixtures of experts with packed 4-bit weights, on CPU: tokens sorted by expert, two products for each chosen expert.

The products read the chosen experts' weights in place. Weights of other experts are not read.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.ops.moe.clamped import clamped
from dlinfer.ops.moe.limited import limited
from dlinfer.ops.moe.routing import Product, check_ids
from dlinfer.vendor.cpu.four_bit.linears import mxfp4_matmul, weight_quant_matmul
from dlinfer.vendor.cpu.moe import gated_silu

_ROWS = 4096
"""The most rows, of all experts together, whose activations are in memory at a time.

A limit below it rarely splits an expert's rows.
"""


def fused_moe_w4a16(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_weights: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
    group_size: int,
) -> Tensor:
    check_ids(topk_ids, gate_up_weights.shape[0], ops.fused_moe_w4a16.rules)

    def product(weights: Tensor, scales: Tensor, zeros: Tensor | None, x: Tensor, expert: int) -> Tensor:
        own = None if zeros is None else zeros[expert]
        return weight_quant_matmul(x, weights[expert], scales[expert], own, None, group_size)

    gate_up = partial(product, gate_up_weights, gate_up_scales, gate_up_zeros)
    down = partial(product, down_weights, down_scales, down_zeros)
    return routed(hidden_states, topk_weights, topk_ids, renormalize, gate_up, down)


def fused_moe_mxfp4(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    down_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    check_ids(topk_ids, gate_up_weights.shape[0], ops.fused_moe_mxfp4.rules)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)

    def product(weights: Tensor, scales: Tensor, bias: Tensor, x: Tensor, expert: int) -> Tensor:
        return mxfp4_matmul(x, weights[expert], scales[expert]).to(wide).add_(bias[expert])

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        return clamped(gate, up, alpha, limit).to(hidden_states.dtype)

    gate_up = partial(product, gate_up_weights, gate_up_scales, gate_up_bias)
    down = partial(product, down_weights, down_scales, down_bias)
    return routed(hidden_states, topk_weights, topk_ids, False, gate_up, down, activated)


def fused_moe_limited_mxfp4(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    limit: float,
) -> Tensor:
    check_ids(topk_ids, gate_up_weights.shape[0], ops.fused_moe_limited_mxfp4.rules)

    def product(weights: Tensor, scales: Tensor, x: Tensor, expert: int) -> Tensor:
        return mxfp4_matmul(x, weights[expert], scales[expert])

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        return limited(gate, up, limit).to(hidden_states.dtype)

    gate_up, down = (
        partial(product, gate_up_weights, gate_up_scales),
        partial(product, down_weights, down_scales),
    )
    return routed(hidden_states, topk_weights, topk_ids, False, gate_up, down, activated)


def routed(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    gate_up: Product,
    down: Product,
    activated: Callable[[Tensor, Tensor], Tensor] = gated_silu,
) -> Tensor:
    """Return each token's weighted sum of its experts' gated MLPs, summed in float32 and rounded once.

    gate_up: a function of (rows, expert). It returns the expert's gate and up projections of the rows, side by side.
    down: a function of (rows, expert). It returns the expert's down projection of the rows.
    activated: a function of (gate, up). It returns the rows for ``down``.

    The results of ``gate_up`` and ``down`` may have any dtype. Only these two run expert by expert. All other work is
    done for all experts together, because for one token each other operation takes as long as a product."""
    weights = topk_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros(hidden_states.shape, dtype=weights.dtype)
    sorted_ids, order = topk_ids.flatten().sort(stable=True)
    tokens, shares = order // topk_ids.shape[1], weights.flatten()[order, None]
    chosen, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    for first in range(0, order.numel(), _ROWS):
        token, share = tokens[first : first + _ROWS], shares[first : first + _ROWS]
        spans = list(_spans(chosen.tolist(), counts.tolist(), first, first + _ROWS))
        rows = hidden_states.index_select(0, token)
        gate, up = _each(gate_up, rows, spans).chunk(2, dim=-1)
        results = _each(down, activated(gate, up), spans)
        out.index_add_(0, token, results.to(out.dtype).mul_(share))
    return out.to(hidden_states.dtype)


def _spans(chosen: list[int], counts: list[int], first: int, behind: int) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, begin, end) for the experts with rows in [first, behind). begin and end count from ``first``.

    chosen, counts: the chosen experts, and how many rows each of them has. Rows are sorted by expert in this order."""
    end = 0
    for expert, count in zip(chosen, counts, strict=True):
        begin, end = max(end, first), end + count
        if begin < min(end, behind):
            yield expert, begin - first, min(end, behind) - first


def _each(product: Product, rows: Tensor, spans: list[tuple[int, int, int]]) -> Tensor:
    return torch.cat([product(rows[begin:end], expert) for expert, begin, end in spans])
