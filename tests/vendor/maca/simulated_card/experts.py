"""Routing and sums of experts: mcoplib's op/vllm/moe."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import FLOATS, require

_INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_NONSENSE = 12345


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool,
) -> None:
    """topk_softmax_kernels.cu."""
    rules.tensor("gating_output", gating_output, FLOATS, 2)
    rules.tensor("topk_weights", topk_weights, (torch.float32,), 2)
    rules.tensor("topk_indices", topk_indices, (torch.int32, torch.uint32, torch.int64), 2)
    rules.tensor("token_expert_indices", token_expert_indices, (torch.int32,), 2)
    tokens, experts = gating_output.shape
    topk = topk_weights.shape[1]
    require(0 < topk <= experts, f"topk: up to {experts}, not {topk}")
    for name, one in (
        ("topk_weights", topk_weights),
        ("topk_indices", topk_indices),
        ("token_expert_indices", token_expert_indices),
    ):
        rules.shape(name, one, (tokens, topk))
    weights, ids = gating_output.float().softmax(-1).topk(topk, dim=-1)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    topk_indices.copy_(ids)
    token_expert_indices.copy_(torch.arange(tokens * topk).view(topk, tokens).t())


def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    maybe_expert_map: Tensor | None,
) -> None:
    """moe_align_sum_kernels.cu: padding is the number of choices; owners of blocks that are not used stay as they are.

    Choices of one expert stand in any order, since threads race for their places: here in falling order.
    """
    require(maybe_expert_map is None, "maybe_expert_map is not simulated")
    rules.tensor("topk_ids", topk_ids, _INTEGERS, 2)
    for name, one in (
        ("sorted_token_ids", sorted_token_ids),
        ("experts_ids", experts_ids),
        ("num_tokens_post_pad", num_tokens_post_pad),
    ):
        rules.tensor(name, one, (torch.int32,), 1)
    rules.shape("num_tokens_post_pad", num_tokens_post_pad, (1,))
    require(-(-num_experts // 32) * 32 < 1024, f"num_experts: up to 992, not {num_experts}")
    require(block_size > 0, "block_size: positive")
    flat = topk_ids.flatten().long()
    rules.within("topk_ids", flat, 0, num_experts - 1)
    sorted_token_ids.fill_(flat.numel())
    experts_ids.fill_(_NONSENSE)
    place = 0
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().flatten().flip(0)
        blocks = -(-mine.numel() // block_size)
        end = place + blocks * block_size
        require(end <= sorted_token_ids.numel(), f"sorted_token_ids: {end} at least")
        require(end // block_size <= experts_ids.numel(), f"experts_ids: {end // block_size} at least")
        sorted_token_ids[place : place + mine.numel()] = mine.int()
        experts_ids[place // block_size : end // block_size] = expert
        place = end
    num_tokens_post_pad.fill_(place)


def moe_sum(input: Tensor, output: Tensor) -> None:
    """moe_align_sum_kernels.cu: sums of 2 to 4 round after each, in the tensors' dtype."""
    rules.tensor("input", input, FLOATS, 3)
    rules.tensor("output", output, FLOATS, 2)
    rules.same_dtype(input=input, output=output)
    rules.shape("output", output, (input.shape[0], input.shape[2]))
    if input.shape[1] in (2, 3, 4):
        output.zero_()
        for choice in input.unbind(1):
            output.add_(choice)
    else:
        output.copy_(input.float().sum(1).to(input.dtype))
