"""Mixture of experts on CPU: in C++ (csrc/moe), or by torch, with one grouped product for each projection.

Both read the chosen experts' weights in place, so no weight is copied. The C++ kernel computes the experts of a decode
step together, at the speed of memory; torch's ``grouped_mm`` takes two to four times as long. ``grouped_mm`` also needs
rows of whole 16-byte words. For other sizes (toy models) a Python loop runs over the chosen experts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer import ops
from dlinfer.ops import moe_gating_topk_softmax as gating
from dlinfer.ops.core.checks import FLOATS, Rules
from dlinfer.ops.moe.clamped import clamped
from dlinfer.ops.moe.limited import limited
from dlinfer.ops.moe.routing import check_ids
from dlinfer.vendor.cpu.compiled import compiled


def moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    kernel = None
    if router_logits.dtype in FLOATS:
        kernel = compiled("moe_gating_topk_softmax", router_logits)
    return (kernel or gating.reference)(router_logits, topk, n_groups)


@contextmanager
def in_the_ops_words(topk_ids: Tensor, experts: int, rules: Rules) -> Iterator[None]:
    """Run a kernel in the ``with`` block. If the kernel raises because of invalid ids, raise the op's own error.

    rules: the op's Rules, which name the op in the error.
    """
    try:
        yield
    except RuntimeError:
        check_ids(topk_ids, experts, rules)
        raise


def fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    ids = (topk_ids, gate_up_weights.shape[0], ops.fused_moe.rules)
    stacks = (gate_up_weights, down_weights)
    kernel = compiled("fused_moe", hidden_states, *stacks) if hidden_states.dtype in FLOATS else None
    if kernel is not None:
        with in_the_ops_words(*ids):
            return kernel(hidden_states, *stacks, topk_weights, topk_ids, renormalize)
    check_ids(*ids)
    return by_torch(hidden_states, stacks, topk_weights, topk_ids, renormalize)


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
    ids = (topk_ids, gate_up_weights.shape[0], ops.fused_moe_clamped.rules)
    stacks = (gate_up_weights, gate_up_bias, down_weights, down_bias)
    kernel = compiled("fused_moe_clamped", hidden_states, *stacks) if hidden_states.dtype in FLOATS else None
    if kernel is not None:
        with in_the_ops_words(*ids):
            return kernel(hidden_states, *stacks, topk_weights, topk_ids, alpha, limit)
    check_ids(*ids)

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        return clamped(gate, up, alpha, limit).to(hidden_states.dtype)

    return by_torch(hidden_states, stacks[::2], topk_weights, topk_ids, False, activated, stacks[1::2])


def fused_moe_limited(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    limit: float,
) -> Tensor:
    check_ids(topk_ids, gate_up_weights.shape[0], ops.fused_moe_limited.rules)
    stacks = (gate_up_weights, down_weights)
    activated = partial(limited, limit=limit)
    return by_torch(hidden_states, stacks, topk_weights, topk_ids, False, activated)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up in new memory, computed by torch."""
    return functional.silu(gate).mul_(up)


def by_torch(
    hidden_states: Tensor,
    stacks: Sequence[Tensor],
    topk_weights: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    activated: Callable[[Tensor, Tensor], Tensor] = gated_silu,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """Compute the mixture by torch. The ids must be valid.

    stacks: (gate and up weights, down weights). biases: (gate and up biases, down biases), or empty.
    """
    weights = topk_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    order, expert, ends = _by_expert(topk_ids, stacks[0].shape[0])
    token = order // topk_ids.shape[1]
    product = _grouped if _groupable(hidden_states, *stacks) else _looped

    def projected(rows: Tensor, which: int) -> Tensor:
        results = product(rows, stacks[which], ends)
        return results if not biases else results.to(weights.dtype) + biases[which].index_select(0, expert)

    gate, up = projected(hidden_states[token], 0).chunk(2, dim=-1)
    results = projected(activated(gate, up), 1)
    out = torch.zeros(hidden_states.shape, dtype=weights.dtype)
    out.index_add_(0, token, results * weights.flatten()[order, None])
    return out.to(hidden_states.dtype)


def _by_expert(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices of all tokens by expert.

    Return three tensors: each choice's index in the flat topk_ids, each choice's expert, and the end of each expert's
    rows.
    """
    expert, order = topk_ids.flatten().sort(stable=True)
    every = torch.arange(experts, dtype=expert.dtype)
    return order, expert, torch.searchsorted(expert, every, right=True, out_int32=True)


def _groupable(hidden_states: Tensor, *weights: Tensor) -> bool:
    if hidden_states.dtype is torch.float64 or not hidden_states.shape[0]:
        return False
    word = 16 // hidden_states.element_size()
    return all(w.stride(2) == 1 and w.stride(1) % word == 0 and w.stride(0) % word == 0 for w in weights)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by the expert's weight [out, in]. The rows of expert e end at ``ends[e]``."""
    return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _looped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = functional.linear(rows[start:end], weights[expert])
        start = end
    return out
