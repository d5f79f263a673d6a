"""Choosing experts, and rows on their way to them and back."""

import torch
from torch import Tensor

from tests.vendor.camb.simulated_mlu import rules
from tests.vendor.camb.simulated_mlu.rules import FLOATS, require


def moe_softmax_topk(
    input: Tensor,
    topk: int,
    normalize: bool,
    num_expert_group: int,
    normed_by: str,
    route_scale: float,
    **others: object,
) -> tuple[Tensor, Tensor]:
    rules.unused(**others)
    require(
        num_expert_group <= 1 and route_scale == 1.0 and not normalize, "the defaults, as far as simulated"
    )
    rules.one_of("normed_by", normed_by, ["topk_logit", "softmax_logit"])
    rules.tensor("input", input, FLOATS, (2, 8))
    require(1 <= topk <= input.shape[-1], f"topk: 1 to {input.shape[-1]}, not {topk}")
    weights, ids = input.float().softmax(-1).topk(topk, dim=-1)
    return weights, ids.int()


def moe_gen_idx(expert_id: Tensor, expert_num: int, return_token2expert_idx: bool) -> tuple[Tensor, ...]:
    require(not return_token2expert_idx, "return_token2expert_idx=True is not simulated")
    rules.tensor("expert_id", expert_id, (torch.int32,), 2)
    rules.within("expert_id", expert_id, 0, expert_num - 1)
    order = expert_id.flatten().argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order))
    counts = expert_id.flatten().bincount(minlength=expert_num)
    sums = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return tuple(one.int() for one in (order // expert_id.shape[1], rows, counts, sums))


def moe_expand_input(input: Tensor, gather_idx: Tensor, **others: object) -> Tensor:
    rules.unused(**others)
    rules.tensor("input", input, (*FLOATS, torch.int8), 2)
    rules.tensor("gather_idx", gather_idx, (torch.int32,), 1)
    rules.within("gather_idx", gather_idx, 0, input.shape[0] - 1)
    return input[gather_idx.long()]


def moe_combine_result(input: Tensor, reduce_weight: Tensor, gather_ids: Tensor, **others: object) -> Tensor:
    rules.unused(**others)
    rules.tensor("input", input, FLOATS, 2)
    rules.tensor("reduce_weight", reduce_weight, (torch.float32,), 2)
    rules.tensor("gather_ids", gather_ids, (torch.int32,), 1)
    rules.shape("gather_ids", gather_ids, (reduce_weight.numel(),))
    rules.shape("input, but the hidden size", input[:, 0], gather_ids.shape)
    rules.within("gather_ids", gather_ids, 0, input.shape[0] - 1)
    rows = input[gather_ids.long()].float().unflatten(0, tuple(reduce_weight.shape))
    return (rows * reduce_weight.unsqueeze(-1)).sum(1).to(input.dtype)
