"""Mixtures of experts whose gate and up projections are limited, as in DeepSeek-V4."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.moe.clamped import check_limit
from dlinfer.ops.moe.floating import TOLERANCES
from dlinfer.ops.moe.mxfp4 import mxfp4_products
from dlinfer.ops.moe.routing import check_ids, choices, matrix_products, routed
from dlinfer.ops.quantised.packing import MXFP4


@fused_op(tolerances=TOLERANCES)
def fused_moe_limited(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    limit: float,
) -> Tensor:
    """Compute, for each token, the weighted sum of its experts' down @ (silu(g) * u).

    g = min(gate @ x, limit); u = clamp(up @ x, -limit, limit) (DeepSeek-V4, 2026, as transformers' DeepseekV4Experts
    computes it).

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, 2 * intermediate, hidden], gate's rows before up's.
    down_weights: [experts, hidden, intermediate]. Both of hidden_states' dtype.
    topk_weights: [tokens, topk], any floating dtype. topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    limit: > 0.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Computed in float32 at least and
    rounded once. Raises OpArgumentError, also for ids out of range.
    """
    experts = gate_up_weights.shape[0]
    check_ids(topk_ids, experts, fused_moe_limited.rules)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)

    products = matrix_products(wide, gate_up_weights), matrix_products(wide, down_weights)
    activated = partial(limited, limit=limit)
    return routed(hidden_states, experts, topk_weights, topk_ids, False, *products, activated)


@fused_op(tolerances=TOLERANCES)
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
    """Compute ``fused_moe_limited`` with weights of 4-bit floats (OCP Microscaling Formats specification 1.0).

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, hidden, 2 * intermediate / 8], int32: eight E2M1 numbers in a word, in the layout
        ``ops.quantised.packing.MXFP4``. The columns of gate come before the columns of up.
    gate_up_scales: [experts, hidden / 32, 2 * intermediate], hidden / 32 rounded up, any floating dtype. Each weight is
        its E2M1 number times the scale of its 32 rows.
    down_weights: [experts, intermediate, hidden / 8], and down_scales: [experts, intermediate / 32, hidden], of the
        dtype of gate_up_scales, likewise.
    topk_weights: [tokens, topk], any floating dtype. topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    limit: > 0.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Computed in float32 at least and rounded
    once. The weights of one expert at a time are dequantised. Raises OpArgumentError, also for ids out of range.
    """
    experts = gate_up_weights.shape[0]
    check_ids(topk_ids, experts, fused_moe_limited_mxfp4.rules)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)

    gate_up = mxfp4_products(wide, gate_up_weights, gate_up_scales)
    down = mxfp4_products(wide, down_weights, down_scales)
    activated = partial(limited, limit=limit)
    return routed(hidden_states, experts, topk_weights, topk_ids, False, gate_up, down, activated)


def limited(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) as a new tensor."""
    return functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


fused_moe_limited.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="like hidden_states [experts, 2 * intermediate, hidden]",
    down_weights="like hidden_states [experts, hidden, intermediate]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


fused_moe_limited_mxfp4.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="int32 on hidden_states [experts, hidden, gate_up_words]",
    gate_up_scales="float on hidden_states [experts, groups(hidden, 32), 2 * intermediate = 8 * gate_up_words]",
    down_weights="int32 on hidden_states [experts, intermediate, down_words]",
    down_scales="like gate_up_scales [experts, groups(intermediate, 32), hidden = 8 * down_words]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


fused_moe_limited.check(check_limit)
fused_moe_limited_mxfp4.check(check_limit)


@fused_moe_limited.samples
def _fused_moe_limited_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        tokens: int, experts: int, hidden: int, intermediate: int, topk: int, limit: float, scale: float = 1.0
    ) -> tuple[Any, ...]:
        x = make.tensor(tokens, hidden)
        gate_up = make.tensor(experts, 2 * intermediate, hidden, scale=scale * hidden**-0.5)
        down = make.tensor(experts, hidden, intermediate, scale=intermediate**-0.5)
        return x, gate_up, down, *choices(make, tokens, experts, topk), limit

    yield Sample("one token", case(1, 8, 32, 48, 2, 10.0))
    yield Sample("many tokens", case(33, 6, 32, 16, 4, 10.0))
    yield Sample("no tokens", case(0, 4, 16, 16, 2, 10.0))
    yield Sample("odd sizes", case(7, 5, 19, 13, 2, 10.0))
    yield Sample("much is cut off", case(9, 4, 16, 16, 2, 0.5, 3.0))
    *rest, ids, limit = case(6, 4, 32, 16, 1, 10.0)
    ids = torch.zeros_like(ids, dtype=torch.int32)
    yield Sample("one expert takes all, int32", (*rest, ids, limit))


@fused_moe_limited_mxfp4.samples
def _fused_moe_limited_mxfp4_samples(make: SampleMaker) -> Iterator[Sample]:
    def weight(experts: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        words = make.integers(-(2**31), 2**31, experts, rows, columns // 8).to(MXFP4.storage)
        powers = torch.exp2(make.integers(-4, -1, experts, MXFP4.groups(rows), columns).double())
        return words, (powers * 2.0 ** -round(rows**0.25)).to(dtype)

    def case(
        tokens: int, experts: int, hidden: int, inner: int, topk: int, limit: float, dtype: torch.dtype
    ) -> tuple[Any, ...]:
        parts = (*weight(experts, hidden, 2 * inner, dtype), *weight(experts, inner, hidden, dtype))
        return make.tensor(tokens, hidden), *parts, *choices(make, tokens, experts, topk), limit

    sixteen = torch.bfloat16
    yield Sample("one token", case(1, 8, 32, 48, 2, 10.0, make.dtype))
    yield Sample("many tokens, scales in bfloat16", case(33, 6, 64, 32, 4, 10.0, sixteen))
    yield Sample("no tokens", case(0, 4, 32, 16, 2, 10.0, sixteen))
    yield Sample("groups that are shorter, much is cut off", case(7, 5, 40, 20, 2, 0.5, sixteen))
    x, *rest, ids, limit = case(6, 4, 32, 16, 1, 10.0, sixteen)
    ids = torch.zeros_like(ids, dtype=torch.int32)
    yield Sample("strided, one expert takes all, int32", (x.t().contiguous().t(), *rest, ids, limit))
