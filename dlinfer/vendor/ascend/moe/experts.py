"""Choose experts and run them: sort rows by expert, make one grouped product for all, and restore the order."""

from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips, layouts, refusing
from dlinfer.vendor.ascend.moe.storage import MOST_GROUPS
from dlinfer.vendor.base import refuses

_MOST_CHOSEN = 512  # of npu_moe_token_unpermute
_MOST_TOPK = 1024  # of npu_moe_gating_top_k_softmax


def _refuses_gating(router_logits: Tensor, topk: int) -> str | None:
    if router_logits.dtype is torch.float64:
        return "float64 is not supported"
    if topk > _MOST_TOPK:
        return f"topk may be up to {_MOST_TOPK}, not {topk}"
    return refusing.lacking(chips.current().routing, "npu_moe_gating_top_k_softmax")


@refuses(lambda router_logits, topk, n_groups: _refuses_gating(router_logits, topk))
def moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    shape = (*router_logits.shape[:-1], topk)
    logits = layouts.rows(router_logits.float())
    if logits.numel() == 0:
        return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)
    if n_groups < 1:
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, None, topk)
        return weights.view(shape), ids.long().view(shape)
    # the best of each group: the vendor's ops choose groups first
    size = logits.shape[-1] // n_groups
    chosen, ids = logits.softmax(-1).unflatten(-1, (n_groups, size)).topk(topk // n_groups, dim=-1)
    first = torch.arange(0, n_groups * size, size, device=ids.device)
    return chosen.reshape(shape), (ids + first[:, None]).reshape(shape)


def _refuses_experts(hidden_states: Tensor, weights: Tensor, topk: int) -> str | None:
    experts, *rest = weights.shape
    if experts > MOST_GROUPS or topk > _MOST_CHOSEN:
        return (
            f"up to {MOST_GROUPS} experts, {_MOST_CHOSEN} for each token, are supported, not {experts} "
            f"and {topk}"
        )
    return refusing.first(
        (
            refusing.lacking(chips.current().routing, "npu_moe_init_routing_v2"),
            refusing.floating(hidden_states),
            refusing.sizes(*rest),
        )
    )


@refusing.where(lambda call: _refuses_experts(call.hidden_states, call.gate_up_weights, call.topk))
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
    rows, places, groups, _ = _routed(hidden_states.contiguous(), topk_ids, gate_up_weights.shape[0])
    gated = _grouped(rows, gate_up_weights, groups)
    out = _grouped(torch.ops.npu.npu_swiglu(gated, -1), down_weights, groups)
    return _together(out, places, topk_weights, renormalize)


def _routed(x: Tensor, topk_ids: Tensor, experts: int, scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """Copy each token's row of x once for each of its chosen experts, and sort the copies by expert.

    scale: [tokens], the scales of a quantised x.

    Returns four tensors:

    - the sorted rows;
    - for each pair of a token and one of its experts, the index of their row among the sorted rows;
    - how many rows each expert has;
    - the scales of the sorted rows.
    """
    rows, places, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        topk_ids.to(torch.int32).contiguous(),
        scale=scale,
        active_num=topk_ids.numel(),
        expert_num=experts,
        expert_tokens_num_type=1,  # counts
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, experts],
        row_idx_type=0,  # the row of each choice
    )
    return rows, places, counts, scales


def _grouped(rows: Tensor, weights: Tensor, groups: Tensor, **quantised: Any) -> Tensor:
    """Multiply the rows of each expert by the expert's own weight.

    rows: sorted by expert. weights: [experts, out, in]. groups: [experts], the number of each expert's rows. quantised:
    more arguments of npu_grouped_matmul, for int8.
    """
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [layouts.weight(weights.contiguous()).transpose(1, 2)],
        group_list=groups,
        split_item=2,  # one tensor
        group_type=0,  # rows are grouped
        group_list_type=int(groups.shape[0] > 1),  # counts; one group's count is its end, as required
        **quantised,
    )
    return out


def _together(rows: Tensor, places: Tensor, topk_weights: Tensor, renormalize: bool) -> Tensor:
    """Return for each token the weighted sum of its rows, one row for each of its experts.

    places: from ``_routed``: for each pair of a token and one of its experts, the index of their row in ``rows``.
    """
    weights = topk_weights.float()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.ops.npu.npu_moe_token_unpermute(rows, places, probs=weights.to(rows.dtype).contiguous())


def _refuses_w8a8(hidden_states: Tensor, weights: Tensor, topk: int) -> str | None:
    return refusing.first(
        (
            refusing.eight_bits(weights.dtype),
            refusing.floating(hidden_states, refusing.HALVES),
            _refuses_experts(hidden_states, weights, topk),
        )
    )


@refusing.where(lambda call: _refuses_w8a8(call.hidden_states, call.gate_up_weights, call.topk))
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
    dtype = hidden_states.dtype

    def product(rows: Tensor, row_scales: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
        scale_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
        of_columns = scales.squeeze(-1).to(scale_dtype).contiguous()
        return _grouped(
            rows,
            weights,
            groups,
            scale=[of_columns],
            per_token_scale=[row_scales.contiguous()],
            output_dtype=dtype,
        )

    numbers, scale = torch.ops.npu.npu_dynamic_quant(hidden_states.contiguous(), dst_type=torch.int8)
    rows, places, groups, row_scales = _routed(numbers, topk_ids, gate_up_weights.shape[0], scale)
    gated = torch.ops.npu.npu_swiglu(product(rows, row_scales, gate_up_weights, gate_up_scales), -1)
    numbers, scale = torch.ops.npu.npu_dynamic_quant(gated, dst_type=torch.int8)
    return _together(product(numbers, scale, down_weights, down_scales), places, topk_weights, renormalize)
