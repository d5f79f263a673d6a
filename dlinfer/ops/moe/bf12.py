"""Mixture of experts with bfloat16 weights, packed in 12 bits a number without loss."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.moe.floating import TOLERANCES, fused_moe
from dlinfer.ops.moe.routing import check_ids, choices
from dlinfer.ops.quantised import bf12


@fused_op(tolerances=TOLERANCES)
def fused_moe_bf12(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    num_experts: int,
    intermediate_size: int,
) -> Tensor:
    """Compute ``dlinfer.ops.fused_moe`` with packed weights: the same result as with the weights before packing.

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [bytes], uint8, contiguous: the stack [experts, 2 * intermediate, hidden], gate's rows before up's,
        as a matrix [experts * 2 * intermediate, hidden] that ``ops.quantised.bf12.pack`` packed. The unpacked weight is
        multiplied in the dtype of hidden_states; in float16, numbers below 2 ** -14 are rounded, and those above 65504
        are infinite.
    down_weights: [bytes], likewise: the stack [experts, hidden, intermediate] as [experts * hidden, intermediate].
    topk_weights: [tokens, topk], any floating dtype.
    topk_ids: [tokens, topk], int32 or int64, of 0..num_experts-1.
    renormalize: divide a token's weights by their sum.
    num_experts, intermediate_size: sizes of the unpacked stacks, which the packed bytes do not store. With tensor
        parallelism, intermediate_size is the size of the rank's slice. The result is then a partial sum, which the
        framework reduces.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Raises OpArgumentError, also for ids
    out of range.
    """
    check_ids(topk_ids, num_experts, fused_moe_bf12.rules)
    hidden, dtype = hidden_states.shape[1], hidden_states.dtype

    def stack(packed: Tensor, rows: int, columns: int) -> Tensor:
        plain = bf12.unpack(packed, num_experts * rows, columns)
        return plain.to(dtype).view(num_experts, rows, columns)

    stacks = (
        stack(gate_up_weights, 2 * intermediate_size, hidden),
        stack(down_weights, hidden, intermediate_size),
    )
    topk = topk_ids.shape[1]
    return fused_moe.reference(hidden_states, *stacks, topk_weights, topk_ids, topk, renormalize)


fused_moe_bf12.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="any on hidden_states [bytes]",
    down_weights="any on hidden_states [down_bytes]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


@fused_moe_bf12.check
def _check_fused_moe_bf12(
    rules: Rules,
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    num_experts: int,
    intermediate_size: int,
) -> None:
    hidden, gate_up_rows = hidden_states.shape[1], num_experts * 2 * intermediate_size
    for name, size in (("num_experts", num_experts), ("intermediate_size", intermediate_size)):
        rules.require(size >= 0, name, "0 or more", lambda size=size: size)
    bf12.check_packed(rules, "gate_up_weights", gate_up_weights, gate_up_rows, hidden)
    bf12.check_packed(rules, "down_weights", down_weights, num_experts * hidden, intermediate_size)


@fused_moe_bf12.samples
def _fused_moe_bf12_samples(make: SampleMaker) -> Iterator[Sample]:
    def plain(experts: int, rows: int, columns: int) -> Tensor:
        return make.tensor(experts * rows, columns, scale=columns**-0.5).bfloat16()

    def case(
        tokens: int, experts: int, hidden: int, inner: int, topk: int, renormalize: bool
    ) -> tuple[Any, ...]:
        x, gate_up, down = (
            make.tensor(tokens, hidden),
            plain(experts, 2 * inner, hidden),
            plain(experts, hidden, inner),
        )
        packed = bf12.pack(gate_up), bf12.pack(down)
        return x, *packed, *choices(make, tokens, experts, topk), renormalize, experts, inner

    yield Sample("one token", case(1, 8, 128, 48, 2, True))
    yield Sample("many tokens, not renormalised", case(33, 6, 256, 128, 4, False))
    yield Sample("no tokens", case(0, 4, 32, 16, 2, True))
    yield Sample("one expert", case(5, 1, 64, 32, 1, False))
    yield Sample("strips that hold rows of two experts", case(7, 5, 131, 13, 2, True))
    x, gate_up, down, weights, ids, *rest = case(6, 4, 128, 32, 2, True)
    ids = torch.zeros_like(ids, dtype=torch.int32)
    ids[:, 1] = 3
    yield Sample("two experts take all, int32", (x, gate_up, down, weights, ids, *rest))
    x, *others = case(9, 4, 128, 32, 2, True)
    yield Sample("strided", (x.t().contiguous().t(), *others))
    gate_up, down = plain(3, 2 * 20, 140), plain(3, 140, 20)
    for weight in (gate_up, down):
        weight[::3, ::7] *= 1e-30
        weight[1::5, 3::11] = -0.0
        weight[20] *= 1e-38  # subnormals among them
    packed = bf12.pack(gate_up), bf12.pack(down)
    yield Sample(
        "exceptions that are tiny", (make.tensor(4, 140), *packed, *choices(make, 4, 3, 2), True, 3, 20)
    )
    few = plain(2, 140, 20)
    down = few * 1e-12
    down[::2, ::9] = few[::2, ::9]
    down[13] = few[13]
    packed = bf12.pack(plain(2, 2 * 20, 140)), bf12.pack(down)
    yield Sample(
        "exceptions that make the result",
        (make.tensor(3, 140), *packed, *choices(make, 3, 2, 1), True, 2, 20),
    )
