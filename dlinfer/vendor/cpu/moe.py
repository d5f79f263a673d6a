"""Mixture of experts on CPU: in C++ (csrc/moe), or by torch, with one grouped product for each projection.

Both read the chosen experts' weights in place, so neither decode nor prefill copies weights or loops in Python. The C++
kernel computes the experts of a decode step together, at the speed of memory; torch's ``grouped_mm`` takes two to four
times as long. It needs rows of whole 16-byte words. For other sizes (toy models) a loop runs over the chosen experts.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer import ops
from dlinfer.ops import moe_gating_topk_softmax as gating
from dlinfer.ops.core.checks import FLOATS
from dlinfer.ops.moe.clamped import clamped
from dlinfer.ops.moe.routing import check_ids
from dlinfer.vendor.cpu.compiled import compiled


def moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    kernel = None
    if router_logits.dtype in FLOATS:
        kernel = compiled("moe_gating_topk_softmax", router_logits)
    return (kernel or gating.reference)(router_logits, topk, n_groups)


def fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    experts = gate_up_weights.shape[0]
    stacks = (gate_up_weights, down_weights)
    kernel = compiled("fused_moe", hidden_states, *stacks) if hidden_states.dtype in FLOATS else None
    if kernel is not None:
        try:
            return kernel(hidden_states, *stacks, topk_weights, topk_ids, renormalize)
        except RuntimeError:
            check_ids(topk_ids, experts, ops.fused_moe.rules)  # raises the op's own error for wrong ids
            raise
    check_ids(topk_ids, experts, ops.fused_moe.rules)
    return grouped_moe(hidden_states, *stacks, topk_weights, topk_ids, renormalize)


def grouped_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
) -> Tensor:
    """Compute ``fused_moe`` by torch. The ids must be valid."""
    experts, topk = gate_up_weights.shape[0], topk_ids.shape[1]
    weights = topk_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    order, _, ends = _by_expert(topk_ids, experts)
    token = order // topk
    product = _grouped if _groupable(hidden_states, gate_up_weights, down_weights) else _looped
    gate, up = product(hidden_states[token], gate_up_weights, ends).chunk(2, dim=-1)
    results = product(functional.silu(gate).mul_(up), down_weights, ends)
    out = torch.zeros(hidden_states.shape, dtype=weights.dtype)
    out.index_add_(0, token, results * weights.flatten()[order, None])
    return out.to(hidden_states.dtype)


def fused_moe_clamped(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_bias: Tensor,
    down_weights: Tensor,
    down_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    experts = gate_up_weights.shape[0]
    stacks = (gate_up_weights, gate_up_bias, down_weights, down_bias)
    kernel = compiled("fused_moe_clamped", hidden_states, *stacks) if hidden_states.dtype in FLOATS else None
    if kernel is not None:
        try:
            return kernel(hidden_states, *stacks, topk_weights, topk_ids, alpha, limit)
        except RuntimeError:
            check_ids(topk_ids, experts, ops.fused_moe_clamped.rules)
            raise
    check_ids(topk_ids, experts, ops.fused_moe_clamped.rules)
    weights = topk_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
    order, expert, ends = _by_expert(topk_ids, experts)
    token = order // topk_ids.shape[1]
    product = _grouped if _groupable(hidden_states, gate_up_weights, down_weights) else _looped
    gate_up = product(hidden_states[token], gate_up_weights, ends).to(weights.dtype)
    gate, up = (gate_up + gate_up_bias.index_select(0, expert)).chunk(2, dim=-1)
    activated = clamped(gate, up, alpha, limit).to(hidden_states.dtype)
    results = product(activated, down_weights, ends).to(weights.dtype) + down_bias.index_select(0, expert)
    out = torch.zeros(hidden_states.shape, dtype=weights.dtype)
    out.index_add_(0, token, results * weights.flatten()[order, None])
    return out.to(hidden_states.dtype)


def _by_expert(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort choices by expert: return their places in topk_ids, their experts, and the end of each expert's rows."""
    expert, order = topk_ids.flatten().sort(stable=True)
    every = torch.arange(experts, dtype=expert.dtype)
    return order, expert, torch.searchsorted(expert, every, right=True, out_int32=True)


def _groupable(hidden_states: Tensor, *weights: Tensor) -> bool:
    if hidden_states.dtype is torch.float64 or not hidden_states.shape[0]:
        return False
    word = 16 // hidden_states.element_size()
    return all(w.stride(2) == 1 and w.stride(1) % word == 0 and w.stride(0) % word == 0 for w in weights)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of expert e, which end at ``ends[e]``, by its weight [out, in]."""
    return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _looped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = functional.linear(rows[start:end], weights[expert])
        start = end
    return out
