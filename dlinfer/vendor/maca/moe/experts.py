"""Choose experts and run them: sort choices by expert, make one grouped product for all, and sum each token's rows."""

import torch
from torch import Tensor

from dlinfer.vendor.base import refuses
from dlinfer.vendor.maca import refusing, sdk

_MOST_EXPERTS = 992
"""The most experts of moe_align_block_size, which rounds the number up to a multiple of 32 that is below 1024."""


@refuses(lambda router_logits, topk, n_groups: refusing.floating(router_logits))
def moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    shape = (*router_logits.shape[:-1], topk)
    weights = router_logits.new_empty(shape, dtype=torch.float32)
    ids = router_logits.new_empty(shape, dtype=torch.int64)
    if weights.numel() == 0:
        return weights, ids
    logits = refusing.rows(router_logits)
    if n_groups >= 1:  # the best of each group: the vendor's ops choose groups first
        size = logits.shape[-1] // n_groups
        chosen, experts = (
            logits.float().softmax(-1).unflatten(-1, (n_groups, size)).topk(topk // n_groups, dim=-1)
        )
        first = torch.arange(0, n_groups * size, size, device=experts.device)
        return chosen.reshape(shape), (experts + first[:, None]).reshape(shape)
    rows = ids.new_empty((logits.shape[0], topk), dtype=torch.int32)  # of each choice; unused
    torch.ops._moe_C.topk_softmax(weights.view(-1, topk), ids.view(-1, topk), rows, logits, False)
    return weights, ids


def _refuses_experts(hidden_states: Tensor, weights: Tensor) -> str | None:
    if not sdk.has_triton():
        return "the grouped product needs Triton, which is not installed (MetaX ships it with its torch)"
    if weights.shape[0] > _MOST_EXPERTS:
        return f"moe_align_block_size supports up to {_MOST_EXPERTS} experts, not {weights.shape[0]}"
    return refusing.floating(hidden_states, refusing.HALVES)


@refusing.where(lambda call: _refuses_experts(call.hidden_states, call.gate_up_weights))
def fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    from dlinfer.vendor.maca.moe.products import BLOCK, Choices, grouped_product

    out = hidden_states.new_empty(hidden_states.shape)
    if hidden_states.numel() == 0 or topk_ids.numel() == 0:
        return out.zero_()
    weights = topk_weights.float()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    choices = Choices(*_in_experts_order(topk_ids, gate_up_weights.shape[0], BLOCK), topk_ids.numel())
    both = grouped_product(refusing.rows(hidden_states), gate_up_weights, choices, per_row=topk)
    gated = both.new_empty(both.shape[0], both.shape[1] // 2)
    torch.ops._C.silu_and_mul(gated, both)
    each = grouped_product(gated, down_weights, choices, row_weights=weights.reshape(-1).contiguous())
    torch.ops._moe_C.moe_sum(each.view(*topk_ids.shape, -1), out)
    return out


def _in_experts_order(topk_ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by expert, and pad those of each expert to whole blocks.

    Returns the fields ``order``, ``owners`` and ``padded`` of ``Choices``. block: the number of choices in a block.
    """
    ids = topk_ids.contiguous()
    most = ids.numel() + experts * (block - 1)
    order = ids.new_empty(most, dtype=torch.int32)
    owners = ids.new_empty(-(-most // block), dtype=torch.int32)
    padded = ids.new_empty(1, dtype=torch.int32)
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, order, owners, padded, None)
    return order, owners, padded
