"""Mixture of experts with 4-bit weights, packed as for ``weight_quant_matmul``."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.moe.floating import TOLERANCES
from dlinfer.ops.moe.routing import Product, check_ids, choices, routed
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.ops.quantised.weight_quant import check_group_size


@fused_op(tolerances=TOLERANCES)
def fused_moe_w4a16(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_weights: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
    group_size: int,
) -> Tensor:
    """Compute ``fused_moe`` with 4-bit weights, multiplied as by ``weight_quant_matmul``.

    For each token, the result is the weighted sum of its experts' gated MLPs, ``(silu(x @ gate) * (x @ up)) @ down``. A
    weight is ``w[i, o] = (q[i, o] - zero[g, o]) * scales[g, o]`` for the group ``g = i // group_size``.

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, hidden, 2 * intermediate / 8], int32: q, eight 4-bit numbers in a word, in the layout
        ``ops.quantised.packing.AWQ``. The columns of gate come before the columns of up.
    gate_up_scales: [experts, groups, 2 * intermediate], any of the floating dtypes.
    gate_up_zeros: [experts, groups, 2 * intermediate / 8], int32: the zero points, packed likewise. None means 8.
    down_weights: [experts, intermediate, hidden / 8], down_scales: [experts, groups, hidden], of the dtype of
        gate_up_scales, and down_zeros: [experts, groups, hidden / 8] or None, likewise.
    topk_weights: [tokens, topk], any floating dtype. topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    renormalize: divide a token's weights by their sum.
    group_size: rows of a weight that share a scale and a zero point; the last group may be shorter. 0 means all rows.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Computed in float32 at least and rounded
    once. The weights of one expert at a time are dequantised. Raises OpArgumentError, also for ids out of range.
    """
    check_ids(topk_ids, gate_up_weights.shape[0], fused_moe_w4a16.rules)
    packing, wide = AWQ.of_groups(group_size), torch.promote_types(hidden_states.dtype, torch.float32)

    def by(weights: Tensor, scales: Tensor, zeros: Tensor | None) -> Product:
        def product(rows: Tensor, expert: int) -> Tensor:
            own = None if zeros is None else zeros[expert]
            return rows.to(wide) @ packing.dequantise(weights[expert], scales[expert], own, wide)

        return product

    products = by(gate_up_weights, gate_up_scales, gate_up_zeros), by(down_weights, down_scales, down_zeros)
    return routed(hidden_states, gate_up_weights.shape[0], topk_weights, topk_ids, renormalize, *products)


fused_moe_w4a16.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="int32 on hidden_states [experts, hidden, gate_up_words]",
    gate_up_scales="float on hidden_states [experts, groups(hidden, group_size), 2 * intermediate = 8 * gate_up_words]",
    gate_up_zeros="int32 on hidden_states [experts, groups(hidden, group_size), gate_up_words]",
    down_weights="int32 on hidden_states [experts, intermediate, down_words]",
    down_scales="like gate_up_scales [experts, groups(intermediate, group_size), hidden = 8 * down_words]",
    down_zeros="int32 on hidden_states [experts, groups(intermediate, group_size), down_words]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


fused_moe_w4a16.check(check_group_size)


@fused_moe_w4a16.samples
def _fused_moe_w4a16_samples(make: SampleMaker) -> Iterator[Sample]:
    def words(*shape: int) -> Tensor:
        return make.integers(-(2**31), 2**31, *shape).to(AWQ.storage)

    def weight(experts: int, rows: int, columns: int, group_size: int, dtype: torch.dtype) -> tuple[Any, ...]:
        groups = AWQ.of_groups(group_size).groups(rows)
        scales = (make.tensor(experts, groups, columns).abs() + 0.5) * 0.1 * rows**-0.5
        return words(experts, rows, columns // 8), scales.to(dtype), words(experts, groups, columns // 8)

    def case(
        tokens: int,
        experts: int,
        hidden: int,
        intermediate: int,
        topk: int,
        renormalize: bool,
        group_size: int,
        dtype: torch.dtype | None = None,
    ) -> tuple[Any, ...]:
        of = dtype or make.dtype
        gate_up = weight(experts, hidden, 2 * intermediate, group_size, of)
        down = weight(experts, intermediate, hidden, group_size, of)
        routes = (*choices(make, tokens, experts, topk), topk, renormalize)
        return make.tensor(tokens, hidden), *gate_up, *down, *routes, group_size

    half = torch.float16
    yield Sample("one token", case(1, 8, 32, 48, 2, True, 16))
    yield Sample("many tokens, not renormalised, scales in float16", case(33, 6, 64, 32, 4, False, 32, half))
    yield Sample("no tokens", case(0, 4, 16, 16, 2, True, 16))
    yield Sample("one expert, one group for all rows", case(5, 1, 16, 24, 1, False, 0))
    yield Sample("last groups that are shorter", case(7, 5, 24, 20, 2, True, 16))
    x, gate_up, gate_up_scales, _, down, down_scales, _, *routes, group = case(6, 4, 32, 16, 2, True, 16)
    routes[1] = torch.zeros_like(routes[1], dtype=torch.int32)
    routes[1][:, 1] = 3
    weights = (gate_up, gate_up_scales, None, down, down_scales, None)
    yield Sample("no zero points, two experts take all, int32", (x, *weights, *routes, group))
    x, *rest = case(9, 4, 32, 16, 2, True, 16)
    yield Sample("strided", (x.t().contiguous().t(), *rest))
