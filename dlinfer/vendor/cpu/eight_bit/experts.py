"""Mixture of experts with 8-bit weights on CPU: tokens sorted by expert, then two products for each chosen expert.

The products read the chosen experts' weights in place. Weights of other experts are not read.
"""

from functools import partial

import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.ops.moe.routing import check_ids
from dlinfer.ops.quantised import eight_bit
from dlinfer.vendor.cpu.eight_bit import rows
from dlinfer.vendor.cpu.eight_bit.products import fp8_product, scaled_fp8_product, scaled_int8_product
from dlinfer.vendor.cpu.four_bit.experts import routed


def fused_moe_w8a8(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    check_ids(topk_ids, gate_up_weights.shape[0], ops.fused_moe_w8a8.rules)

    def product(weights: Tensor, scales: Tensor, x: Tensor, expert: int) -> Tensor:
        scaled = scaled_int8_product if weights.dtype is torch.int8 else scaled_fp8_product
        numbers, scale = rows.dynamic_quant(x, weights.dtype)
        row_scale = scales[expert].reshape(-1).to(torch.float32)
        return scaled(numbers, scale.reshape(-1), weights[expert], row_scale, torch.float32, None)

    gate_up, down = (
        partial(product, gate_up_weights, gate_up_scales),
        partial(product, down_weights, down_scales),
    )
    return routed(hidden_states, topk_weights, topk_ids, renormalize, gate_up, down)


def fused_moe_blocked_fp8(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
    block_size: int,
    power_of_two_scales: bool,
) -> Tensor:
    check_ids(topk_ids, gate_up_weights.shape[0], ops.fused_moe_blocked_fp8.rules)
    block = (block_size, block_size)

    def product(weights: Tensor, scales: Tensor, power_of_two: bool, x: Tensor, expert: int) -> Tensor:
        kept = rows.rounded_in_blocks(x, block_size, power_of_two)
        return fp8_product(kept, weights[expert], scales[expert], block, torch.float32, None)

    gate_up = partial(product, gate_up_weights, gate_up_scales, power_of_two_scales)
    down = partial(product, down_weights, down_scales, False)
    return routed(hidden_states, topk_weights, topk_ids, renormalize, gate_up, down)


def fused_moe_static_fp8(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    gate_up_input_scale: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    down_input_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    check_ids(topk_ids, gate_up_weights.shape[0], ops.fused_moe_static_fp8.rules)

    def product(weights: Tensor, scales: Tensor, input_scale: Tensor, x: Tensor, expert: int) -> Tensor:
        weight = weights[expert]
        kept = eight_bit.rounded_by(x, input_scale.expand(len(weights))[expert])
        return fp8_product(kept, weight, scales[expert], (1, weight.shape[1]), torch.float32, None)

    gate_up = partial(product, gate_up_weights, gate_up_scales, gate_up_input_scale)
    down = partial(product, down_weights, down_scales, down_input_scale)
    return routed(hidden_states, topk_weights, topk_ids, renormalize, gate_up, down)
