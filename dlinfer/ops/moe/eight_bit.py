"""Mixture of experts with 8-bit weights and activations. Scales are per token and row, per block, or fixed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.moe.routing import Product, check_ids, choices, refuse_expert_parallel, routed
from dlinfer.ops.quantised import eight_bit
from dlinfer.ops.quantised.linear_fp8 import FP8, blocked_weight
from dlinfer.ops.quantised.linear_w8a8 import quantised_weight
from dlinfer.utils.type_annotation import MoeMetadata

_STEP = (
    "the activation between the two products is rounded to 8 bits; a value halfway between two codes may round to "
    "either, a step of 1 in 127, or of 1 in 16 in float8"
)
_TOLERANCE = Tolerance(2e-2, 2e-2, _STEP)


@fused_op(tolerances=_TOLERANCE)
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
    """The torch op behind ``dlinfer.ops.fused_moe_w8a8``."""
    check_ids(topk_ids, gate_up_weights.shape[0], fused_moe_w8a8.rules)

    def by(weights: Tensor, scales: Tensor) -> Product:
        def product(rows: Tensor, expert: int) -> Tensor:
            numbers, scale = eight_bit.per_token(rows, weights.dtype)
            return (eight_bit.product(numbers, weights[expert]) * scale * scales[expert].flatten()).float()

        return product

    products = by(gate_up_weights, gate_up_scales), by(down_weights, down_scales)
    return routed(hidden_states, gate_up_weights.shape[0], topk_weights, topk_ids, renormalize, *products)


@fused_moe_w8a8.python_call
def _call_fused_moe_w8a8(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_scales: Tensor,
    down_weights: Tensor,
    down_scales: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
    moe_metadata: MoeMetadata | None = None,
) -> Tensor:
    """Compute ``fused_moe`` with 8-bit weights and activations, multiplied as by ``linear_w8a8``.

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, 2 * intermediate, hidden], gate's rows before up's; int8 or float8_e4m3fn.
    gate_up_scales: [experts, 2 * intermediate, 1], float32 or bfloat16: the scale of each row.
    down_weights: [experts, hidden, intermediate], likewise.
    down_scales: [experts, hidden, 1], likewise. hidden and intermediate are at least 1.
    topk_weights: [tokens, topk], any floating dtype. topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    renormalize: divide a token's weights by their sum.
    moe_metadata: only its ``ep_size`` is read.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. hidden_states, and the activation
    between the two products, are quantised token by token to the weights' dtype, as by ``dynamic_quant``.
    Raises OpArgumentError. Raises UnsupportedFeatureError for expert parallelism.
    """
    refuse_expert_parallel(fused_moe_w8a8, moe_metadata)
    return fused_moe_w8a8.overload(
        hidden_states,
        gate_up_weights,
        gate_up_scales,
        down_weights,
        down_scales,
        topk_weights,
        topk_ids,
        topk,
        renormalize,
    )


def _check_sizes(rules: Rules, hidden_states: Tensor, down_weights: Tensor) -> None:
    for argument, what, tensor, size in (
        ("hidden_states", "a hidden size", hidden_states, hidden_states.shape[1]),
        ("down_weights", "an intermediate size", down_weights, down_weights.shape[2]),
    ):
        rules.require(size >= 1, argument, f"{what} of at least 1", lambda tensor=tensor: tuple(tensor.shape))


fused_moe_w8a8.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="any on hidden_states [experts, 2 * intermediate, hidden]",
    gate_up_scales="any on hidden_states [experts, 2 * intermediate, 1]",
    down_weights="like gate_up_weights [experts, hidden, intermediate]",
    down_scales="like gate_up_scales [experts, hidden, 1]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


@fused_moe_w8a8.check
def _check_fused_moe_w8a8(
    rules: Rules, hidden_states: Tensor, gate_up_weights: Tensor, gate_up_scales: Tensor, down_weights: Tensor
) -> None:
    _check_sizes(rules, hidden_states, down_weights)
    if gate_up_weights.dtype not in eight_bit.LARGEST:
        raise rules.error("gate_up_weights", "an int8 or float8_e4m3fn tensor", gate_up_weights.dtype)
    if gate_up_scales.dtype not in (torch.float32, torch.bfloat16):
        raise rules.error("gate_up_scales", "a float32 or bfloat16 tensor", gate_up_scales.dtype)


@fused_moe_w8a8.samples
def _fused_moe_w8a8_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        dtype: torch.dtype, tokens: int, experts: int, hidden: int, inner: int, topk: int, renormalize: bool
    ) -> tuple[Any, ...]:
        gate_up = quantised_weight(make, dtype, experts, 2 * inner, hidden)
        down = quantised_weight(make, dtype, experts, hidden, inner)
        routes = choices(make, tokens, experts, topk)
        return make.tensor(tokens, hidden), *gate_up, *down, *routes, topk, renormalize

    for dtype in eight_bit.LARGEST:
        named = str(dtype).removeprefix("torch.")
        yield Sample(f"one token, {named}", case(dtype, 1, 8, 32, 48, 2, True))
        yield Sample(f"many tokens, not renormalised, {named}", case(dtype, 33, 6, 32, 16, 4, False))
        yield Sample(f"odd sizes, {named}", case(dtype, 7, 5, 19, 13, 2, True))
    yield Sample("no tokens", case(torch.int8, 0, 4, 16, 16, 2, True))


@fused_op(tolerances=_TOLERANCE)
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
    """Compute ``fused_moe`` with float8 weights and a scale for each block, multiplied as by ``linear_blocked_fp8``.

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, 2 * intermediate, hidden], gate's rows before up's; float8_e4m3fn.
    gate_up_scales: [experts, 2 * intermediate / block_size, hidden / block_size], float32; both quotients are rounded
        up.
    down_weights: [experts, hidden, intermediate], likewise.
    down_scales: [experts, hidden / block_size, intermediate / block_size], likewise. hidden and intermediate are at
        least 1.
    topk_weights: [tokens, topk], any floating dtype. topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    renormalize: divide a token's weights by their sum.
    block_size: rows and columns of a block; 128 in known checkpoints.
    power_of_two_scales: round the scales of hidden_states up to powers of two (the format ue8m0).

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Scales of the activation between the two
    products are never rounded to powers of two, as in LMDeploy (``pytorch/kernels/cuda/moe/blocked_fp8.py``). Raises
    OpArgumentError.
    """
    check_ids(topk_ids, gate_up_weights.shape[0], fused_moe_blocked_fp8.rules)

    def by(weights: Tensor, scales: Tensor, power_of_two: bool) -> Product:
        def product(rows: Tensor, expert: int) -> Tensor:
            wide = eight_bit.widened_blocks(weights[expert], scales[expert], block_size)
            return eight_bit.product(
                eight_bit.rounded_in_blocks(rows, block_size, power_of_two), wide
            ).float()

        return product

    products = by(gate_up_weights, gate_up_scales, power_of_two_scales), by(down_weights, down_scales, False)
    return routed(hidden_states, gate_up_weights.shape[0], topk_weights, topk_ids, renormalize, *products)


fused_moe_blocked_fp8.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="float8_e4m3fn on hidden_states [experts, 2 * intermediate, hidden]",
    gate_up_scales="float32 on hidden_states [experts, groups(2 * intermediate, block_size), "
    "groups(hidden, block_size)]",
    down_weights="float8_e4m3fn on hidden_states [experts, hidden, intermediate]",
    down_scales="float32 on hidden_states [experts, groups(hidden, block_size), groups(intermediate, block_size)]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


@fused_moe_blocked_fp8.check
def _check_fused_moe_blocked_fp8(
    rules: Rules, hidden_states: Tensor, down_weights: Tensor, block_size: int
) -> None:
    _check_sizes(rules, hidden_states, down_weights)
    rules.require(block_size >= 1, "block_size", "at least 1", lambda: block_size)


@fused_moe_blocked_fp8.samples
def _fused_moe_blocked_fp8_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        tokens: int,
        experts: int,
        hidden: int,
        inner: int,
        topk: int,
        renormalize: bool,
        block: int,
        two: bool,
    ) -> tuple[Any, ...]:
        gate_up = blocked_weight(make, block, experts, 2 * inner, hidden)
        down = blocked_weight(make, block, experts, hidden, inner)
        routes = choices(make, tokens, experts, topk)
        return make.tensor(tokens, hidden), *gate_up, *down, *routes, topk, renormalize, block, two

    yield Sample("one token", case(1, 8, 32, 48, 2, True, 16, False))
    yield Sample("many tokens, not renormalised", case(33, 6, 32, 16, 4, False, 16, False))
    yield Sample("scales that are powers of two", case(5, 4, 32, 32, 2, True, 16, True))
    yield Sample("sizes that blocks do not divide", case(7, 5, 19, 13, 2, True, 16, False))
    yield Sample("no tokens", case(0, 4, 16, 16, 2, True, 16, False))


@fused_op(tolerances=_TOLERANCE)
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
    """Compute ``fused_moe`` with float8 weights and fixed scales, multiplied as by ``linear_static_fp8``.

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, 2 * intermediate, hidden], gate's rows before up's; float8_e4m3fn.
    gate_up_scales: [experts, 2 * intermediate, 1], float32: the scale of each row.
    gate_up_input_scale: [1] or [experts], float32: the scale of an expert's input.
    down_weights: [experts, hidden, intermediate], down_scales: [experts, hidden, 1], and down_input_scale: likewise.
        hidden and intermediate are at least 1.
    topk_weights: [tokens, topk], any floating dtype. topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    renormalize: divide a token's weights by their sum.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Raises OpArgumentError.
    """
    check_ids(topk_ids, gate_up_weights.shape[0], fused_moe_static_fp8.rules)

    def by(weights: Tensor, scales: Tensor, input_scale: Tensor) -> Product:
        each = input_scale.expand(weights.shape[0])

        def product(rows: Tensor, expert: int) -> Tensor:
            kept = eight_bit.rounded_by(rows, each[expert])
            return (eight_bit.product(kept, weights[expert]) * scales[expert].flatten()).float()

        return product

    products = (
        by(gate_up_weights, gate_up_scales, gate_up_input_scale),
        by(down_weights, down_scales, down_input_scale),
    )
    return routed(hidden_states, gate_up_weights.shape[0], topk_weights, topk_ids, renormalize, *products)


fused_moe_static_fp8.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="float8_e4m3fn on hidden_states [experts, 2 * intermediate, hidden]",
    gate_up_scales="float32 on hidden_states [experts, 2 * intermediate, 1]",
    down_weights="float8_e4m3fn on hidden_states [experts, hidden, intermediate]",
    down_scales="float32 on hidden_states [experts, hidden, 1]",
    gate_up_input_scale="float32 on hidden_states [input_scales]",
    down_input_scale="float32 on hidden_states [down_input_scales]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


@fused_moe_static_fp8.check
def _check_fused_moe_static_fp8(
    rules: Rules,
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    gate_up_input_scale: Tensor,
    down_weights: Tensor,
    down_input_scale: Tensor,
) -> None:
    _check_sizes(rules, hidden_states, down_weights)
    for name, scale in (("gate_up_input_scale", gate_up_input_scale), ("down_input_scale", down_input_scale)):
        if scale.shape[0] != 1:
            rules.size(name, scale, 0, gate_up_weights.shape[0], "the number of experts, or 1")


@fused_moe_static_fp8.samples
def _fused_moe_static_fp8_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(tokens: int, experts: int, hidden: int, inner: int, topk: int, each: bool) -> tuple[Any, ...]:
        gate_up = quantised_weight(make, FP8, experts, 2 * inner, hidden)
        down = quantised_weight(make, FP8, experts, hidden, inner)
        scale = (torch.rand(experts if each else 1, generator=make.generator) + 0.5).to(make.device) / 100
        routes = choices(make, tokens, experts, topk)
        return make.tensor(tokens, hidden), *gate_up, scale, *down, scale / 2, *routes, topk, True

    yield Sample("one token, a scale for each expert", case(1, 8, 32, 48, 2, True))
    yield Sample("many tokens, one scale for all", case(33, 6, 32, 16, 4, False))
    yield Sample("no tokens", case(0, 4, 16, 16, 2, True))
    yield Sample("odd sizes", case(7, 5, 19, 13, 2, True))
