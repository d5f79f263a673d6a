"""Mixture of experts as in GPT-OSS, with weights of 4-bit floats in the layout ``ops.quantised.packing.MXFP4``."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.moe.clamped import check_limit, clamped
from dlinfer.ops.moe.floating import TOLERANCES
from dlinfer.ops.moe.routing import Product, check_ids, routed
from dlinfer.ops.quantised.packing import MXFP4


@fused_op(tolerances=TOLERANCES)
def fused_moe_mxfp4(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    down_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Compute ``fused_moe_clamped`` with weights of 4-bit floats (OCP Microscaling Formats specification 1.0).

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, hidden, 2 * intermediate / 8], int32: eight E2M1 numbers in a word, in the layout
        ``ops.quantised.packing.MXFP4``. The columns of gate come before the columns of up.
    gate_up_scales: [experts, hidden / 32, 2 * intermediate], hidden / 32 rounded up, any floating dtype. Each weight is
        its E2M1 number times the scale of its 32 rows.
    gate_up_bias: [experts, 2 * intermediate], of hidden_states' dtype.
    down_weights: [experts, intermediate, hidden / 8], down_scales: [experts, intermediate / 32, hidden], of the dtype
        of gate_up_scales, and down_bias: [experts, hidden], likewise.
    topk_weights: [tokens, topk], any floating dtype. topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    alpha: the factor in the sigmoid. limit: > 0.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Computed in float32 at least and rounded
    once. The weights of one expert at a time are dequantised. Raises OpArgumentError, also for ids out of range.
    """
    check_ids(topk_ids, gate_up_weights.shape[0], fused_moe_mxfp4.rules)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)

    gate_up = mxfp4_products(wide, gate_up_weights, gate_up_scales, gate_up_bias)
    down = mxfp4_products(wide, down_weights, down_scales, down_bias)
    activated = partial(clamped, alpha=alpha, limit=limit)
    experts = gate_up_weights.shape[0]
    return routed(hidden_states, experts, topk_weights, topk_ids, False, gate_up, down, activated)


def mxfp4_products(
    dtype: torch.dtype, weights: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Product:
    """Return ``matrix_products`` by weights in the layout MXFP4; one expert's at a time are dequantised."""

    def product(rows: Tensor, expert: int) -> Tensor:
        result = rows.to(dtype) @ MXFP4.dequantise(weights[expert], scales[expert], None, dtype)
        return result if bias is None else result + bias[expert].to(dtype)

    return product


fused_moe_mxfp4.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="int32 on hidden_states [experts, hidden, gate_up_words]",
    gate_up_scales="float on hidden_states [experts, groups(hidden, 32), 2 * intermediate = 8 * gate_up_words]",
    gate_up_bias="like hidden_states [experts, 2 * intermediate]",
    down_weights="int32 on hidden_states [experts, intermediate, down_words]",
    down_scales="like gate_up_scales [experts, groups(intermediate, 32), hidden = 8 * down_words]",
    down_bias="like hidden_states [experts, hidden]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


fused_moe_mxfp4.check(check_limit)


@fused_moe_mxfp4.samples
def _fused_moe_mxfp4_samples(make: SampleMaker) -> Iterator[Sample]:
    def weight(experts: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, ...]:
        words = make.integers(-(2**31), 2**31, experts, rows, columns // 8).to(MXFP4.storage)
        powers = torch.exp2(make.integers(-4, -1, experts, MXFP4.groups(rows), columns).double())
        return words, (powers * 2.0 ** -round(rows**0.25)).to(dtype), make.tensor(experts, columns)

    def case(
        tokens: int, experts: int, hidden: int, inner: int, topk: int, limit: float, dtype: torch.dtype
    ) -> tuple[Any, ...]:
        weights, ids = torch.randn(tokens, experts, generator=make.generator).softmax(-1).topk(topk)
        parts = (*weight(experts, hidden, 2 * inner, dtype), *weight(experts, inner, hidden, dtype))
        return make.tensor(tokens, hidden), *parts, weights.to(make.device), ids.to(make.device), 1.702, limit

    sixteen = torch.bfloat16
    yield Sample("one token", case(1, 8, 32, 48, 2, 7.0, make.dtype))
    yield Sample("many tokens, scales in bfloat16", case(33, 6, 64, 32, 4, 7.0, sixteen))
    yield Sample("no tokens", case(0, 4, 32, 16, 2, 7.0, sixteen))
    yield Sample("groups that are shorter, much is cut off", case(7, 5, 40, 20, 2, 0.5, sixteen))
    x, *rest, ids, alpha, limit = case(6, 4, 32, 16, 1, 7.0, sixteen)
    ids = torch.zeros_like(ids, dtype=torch.int32)
    yield Sample("strided, one expert takes all, int32", (x.t().contiguous().t(), *rest, ids, alpha, limit))
