"""Choose experts and run them: sort rows by expert, make one grouped product for all, and restore the order."""

import torch
from torch import Tensor

from dlinfer.vendor.base import refuses
from dlinfer.vendor.camb import layouts, refusing
from dlinfer.vendor.camb.sdk import tmo


@refuses(lambda router_logits, topk, n_groups: refusing.floating(router_logits))
def moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    shape = (*router_logits.shape[:-1], topk)
    if router_logits.numel() == 0:
        return (
            router_logits.new_empty(shape, dtype=torch.float32),
            router_logits.new_empty(shape, dtype=torch.int64),
        )
    if n_groups < 1:
        weights, ids = tmo().moe_softmax_topk(layouts.rows(router_logits), topk)
        return weights.view(shape), ids.long().view(shape)
    # the best of each group: the vendor's op chooses groups first
    size = router_logits.shape[-1] // n_groups
    grouped = router_logits.float().softmax(-1).unflatten(-1, (n_groups, size))
    chosen, ids = grouped.topk(topk // n_groups, dim=-1)
    first = torch.arange(0, n_groups * size, size, device=ids.device)
    return chosen.reshape(shape), (ids + first[:, None]).reshape(shape)


@refusing.where(lambda call: refusing.floating(call.hidden_states))
def fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    if hidden_states.numel() == 0 or topk_ids.numel() == 0:
        return hidden_states.new_zeros(hidden_states.shape)

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        return tmo().group_gemm(rows, weights.contiguous(), counts, None, None, None, None, topk_ids.numel())

    sources, places, counts = _routed(topk_ids, gate_up_weights.shape[0])
    rows = tmo().moe_expand_input(hidden_states.contiguous(), sources)
    gated = tmo().moe_active(product(rows, gate_up_weights), "silu", True)
    return _together(product(gated, down_weights), places, topk_weights, renormalize)


def _routed(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by expert. A choice is a pair of a token and one of its experts, and gives one row.

    Returns three tensors: each sorted row's token, the index of each choice's row among the sorted rows, and each
    expert's number of rows.
    """
    ids = layouts.index(topk_ids, topk_ids.device)
    sources, places, counts, _ = tmo().moe_gen_idx(ids, experts)
    return sources, places, counts


def _together(rows: Tensor, places: Tensor, topk_weights: Tensor, renormalize: bool) -> Tensor:
    """Return for each token the weighted sum of its rows.

    places: from ``_routed``, the index of each choice's row in ``rows``.

    moe_combine_result needs each expert's number of rows only if other cards have some of the experts. Here all experts
    are on one card.
    """
    weights = topk_weights.float()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return tmo().moe_combine_result(rows, weights.contiguous(), places, None, None, 0, 0)


@refusing.where(
    lambda call: (
        refusing.eight_bits(call.gate_up_weights.dtype)
        or refusing.dtype(call.hidden_states.dtype, refusing.HALVES)
    )
)
def fused_moe_w8a8(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    if hidden_states.numel() == 0 or topk_ids.numel() == 0:
        return hidden_states.new_zeros(hidden_states.shape)

    def product(rows: Tensor, row_scales: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
        return tmo().smooth_quant_group_gemm(
            rows,
            weights.contiguous(),
            counts,
            None,
            None,
            None,
            None,
            row_scales,
            scales.flatten(1).float().contiguous(),
            hidden_states.dtype,
            topk_ids.numel(),
        )

    device, (hidden, inner) = hidden_states.device, down_weights.shape[1:]
    sources, places, counts = _routed(topk_ids, gate_up_weights.shape[0])
    # a row of zeros has scale 0, so its product is zeros, whatever its numbers are
    rows, row_scales = tmo().moe_quantize(
        hidden_states.contiguous(), layouts.ones(hidden, device), gather_index=sources
    )
    gated = product(rows, row_scales, gate_up_weights, gate_up_scales)
    rows, row_scales = tmo().moe_quantize(gated, layouts.ones(inner, device), act_mode="silu", is_gated=True)
    return _together(product(rows, row_scales, down_weights, down_scales), places, topk_weights, renormalize)
