"""Mixture of experts with biases and a clamped gated activation, as in GPT-OSS."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.moe.floating import TOLERANCES
from dlinfer.ops.moe.routing import check_ids, matrix_products, routed


@fused_op(tolerances=TOLERANCES)
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
    """Compute, for each token, the weighted sum of its experts' down @ ((u + 1) * g * sigmoid(alpha * g)) + down_bias.

    g = min(gate @ x + gate_bias, limit); u = clamp(up @ x + up_bias, -limit, limit) (OpenAI, 2025, gpt-oss model card,
    arXiv:2508.10925, and its reference implementation).

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, 2 * intermediate, hidden], gate's rows before up's.
    gate_up_bias: [experts, 2 * intermediate].
    down_weights: [experts, hidden, intermediate]. down_bias: [experts, hidden]. All of hidden_states' dtype.
    topk_weights: [tokens, topk], any floating dtype. topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    alpha: the factor in the sigmoid. limit: > 0.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Computed in float32 at least and
    rounded once. Raises OpArgumentError, also for ids out of range.
    """
    check_ids(topk_ids, gate_up_weights.shape[0], fused_moe_clamped.rules)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)

    gate_up = matrix_products(wide, gate_up_weights, gate_up_bias)
    down = matrix_products(wide, down_weights, down_bias)
    activated = partial(clamped, alpha=alpha, limit=limit)
    experts = gate_up_weights.shape[0]
    return routed(hidden_states, experts, topk_weights, topk_ids, False, gate_up, down, activated)


def clamped(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return GPT-OSS's gated activation, (u + 1) * g * sigmoid(alpha * g), as a new tensor."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1))


fused_moe_clamped.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="like hidden_states [experts, 2 * intermediate, hidden]",
    gate_up_bias="like hidden_states [experts, 2 * intermediate]",
    down_weights="like hidden_states [experts, hidden, intermediate]",
    down_bias="like hidden_states [experts, hidden]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


@fused_moe_clamped.check
def check_limit(rules: Rules, limit: float) -> None:
    """Raise OpArgumentError unless ``limit`` is positive."""
    rules.require(limit > 0, "limit", "a positive number", lambda: limit)


@fused_moe_clamped.samples
def _fused_moe_clamped_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        tokens: int, experts: int, hidden: int, intermediate: int, topk: int, limit: float, scale: float = 1.0
    ) -> tuple[Any, ...]:
        logits = torch.randn(tokens, experts, generator=make.generator)
        weights, ids = logits.topk(topk)
        return (
            make.tensor(tokens, hidden),
            make.tensor(experts, 2 * intermediate, hidden, scale=scale * hidden**-0.5),
            make.tensor(experts, 2 * intermediate),
            make.tensor(experts, hidden, intermediate, scale=0.5 * intermediate**-0.5),
            make.tensor(experts, hidden),
            weights.softmax(-1).to(make.device),
            ids.to(make.device),
            1.702,
            limit,
        )

    yield Sample("one token", case(1, 8, 32, 48, 2, 7.0))
    yield Sample("many tokens", case(33, 6, 32, 16, 4, 7.0))
    yield Sample("no tokens", case(0, 4, 16, 16, 2, 7.0))
    yield Sample("odd sizes", case(7, 5, 19, 13, 2, 7.0))
    yield Sample("much is cut off", case(9, 4, 16, 16, 2, 0.5, 3.0))
    *rest, ids, alpha, limit = case(6, 4, 32, 16, 1, 7.0)
    yield Sample(
        "one expert takes all, int32", (*rest, torch.zeros_like(ids, dtype=torch.int32), alpha, limit)
    )
