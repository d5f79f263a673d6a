"""Expert routing and mixtures of experts."""

import torch
from torch import Tensor


def moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    """Lower to ``MoeGatingTopKSoftmax``. With groups of experts, lower to torch's softmax and topk in each group."""
    logits = router_logits.float()
    if n_groups < 1:
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, None, topk)
        return weights, ids.long()
    size = logits.shape[-1] // n_groups
    chosen, ids = logits.softmax(-1).unflatten(-1, (n_groups, size)).topk(topk // n_groups, dim=-1)
    first = torch.arange(0, n_groups * size, size, device=ids.device)
    return chosen.flatten(-2), (ids + first[:, None]).flatten(-2)


def fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    """Lower to ``MoeInitRoutingV3``, ``GroupedMatmul``, ``SwiGlu``, ``GroupedMatmul``, and a gather of rows.

    The gather replaces npu_moe_token_unpermute of the eager kernel, because torchair has no converter for that op.
    """
    experts = gate_up_weights.shape[0]
    rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        hidden_states,
        topk_ids.to(torch.int32),
        active_num=-1,  # all
        expert_num=experts,
        expert_tokens_num_type=1,  # counts
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, experts],
        row_idx_type=0,  # the row of each choice
    )
    gated = _grouped(rows, gate_up_weights, counts)
    out = _grouped(torch.ops.npu.npu_swiglu(gated, -1), down_weights, counts)
    weights = topk_weights.float()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    chosen = out.index_select(0, places).reshape(-1, topk, out.shape[-1]).float()
    return (chosen * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply the rows of each expert by the expert's own weight.

    rows: sorted by expert. weights: [experts, out, in]. counts: [experts], the number of each expert's rows.
    """
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weights.transpose(1, 2)],
        group_list=counts,
        split_item=2,  # one tensor
        group_type=0,  # rows are grouped
        group_list_type=int(counts.shape[0] > 1),  # counts; one group's count is also its end
    )
    return out
