"""Mixture of experts with weights in GGUF's blocks."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.moe import floating
from dlinfer.ops.moe.routing import check_ids, choices, routed
from dlinfer.ops.quantised import gguf
from dlinfer.ops.quantised.gguf_samples import packed as pack

_ROUNDING = "rounding products, activations and results alone gives errors of up to 1.8e-3 and 2.2e-2"
TOLERANCES = floating.TOLERANCES | {
    torch.float16: Tolerance(4e-3, 4e-3, _ROUNDING),
    torch.bfloat16: Tolerance(2.4e-2, 2.4e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def fused_moe_gguf(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    intermediate_size: int,
    gate_up_types: Sequence[int],
    down_type: int,
) -> Tensor:
    """Compute ``dlinfer.ops.fused_moe`` with weights in GGUF's blocks, multiplied as by ``linear_gguf``.

    hidden_states: [tokens, hidden], float32, float16 or bfloat16, any strides.
    gate_up_weights: [experts, bytes], uint8. An expert's bytes are gate [intermediate, hidden], then up of the same
        size. Any strides; if an expert's bytes are not contiguous, each call copies them.
    down_weights: [experts, bytes], likewise: of each expert down [hidden, intermediate].
    topk_weights: [tokens, topk], any floating dtype.
    topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    renormalize: divide a token's weights by their sum.
    intermediate_size: the number of rows of gate and of up.
    gate_up_types: GGUF's numbers of the types of gate and of up.
    down_type: GGUF's number of down's type.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. The weights of one expert at a time are
    unpacked. Raises OpArgumentError, also for ids out of range.
    """
    experts, hidden, dtype = gate_up_weights.shape[0], hidden_states.shape[1], hidden_states.dtype
    check_ids(topk_ids, experts, fused_moe_gguf.rules)
    wide = torch.promote_types(dtype, torch.float32)

    def gate_up(x: Tensor, expert: int) -> Tensor:
        packed, rows = gate_up_weights[expert].contiguous(), [intermediate_size] * 2
        weight = gguf.unpack(packed, gate_up_types, rows, hidden, dtype)
        return x.to(wide) @ weight.to(wide).t()

    def down(x: Tensor, expert: int) -> Tensor:
        packed = down_weights[expert].contiguous()
        weight = gguf.unpack(packed, [down_type], [hidden], intermediate_size, dtype)
        return x.to(wide) @ weight.to(wide).t()

    return routed(hidden_states, experts, topk_weights, topk_ids, renormalize, gate_up, down)


fused_moe_gguf.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="any on hidden_states [experts, gate_up_bytes]",
    down_weights="any on hidden_states [experts, down_bytes]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


@fused_moe_gguf.check
def _check_fused_moe_gguf(
    rules: Rules,
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    intermediate_size: int,
    gate_up_types: Sequence[int],
    down_type: int,
) -> None:
    hidden, both = hidden_states.shape[1], [intermediate_size] * 2
    gguf.check_packed(rules, "gate_up_weights", gate_up_weights, gate_up_types, both, hidden)
    gguf.check_packed(rules, "down_weights", down_weights, [down_type], [hidden], intermediate_size)


@fused_moe_gguf.samples
def _fused_moe_gguf_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        tokens: int,
        experts: int,
        hidden: int,
        inner: int,
        topk: int,
        renormalize: bool,
        types: tuple[int, int, int],
        scale: float = 1.0,
    ) -> tuple[Any, ...]:
        *both, last = types
        gate_up = torch.stack([pack(make, both, [inner, inner], hidden) for _ in range(experts)])
        down = torch.stack([pack(make, [last], [hidden], inner) for _ in range(experts)])
        x, routes = make.tensor(tokens, hidden, scale=scale), choices(make, tokens, experts, topk)
        return x, gate_up, down, *routes, renormalize, inner, both, last

    yield Sample("one token", case(1, 8, 64, 32, 2, True, (2, 2, 8)))
    # Larger tokens give results of up to 28: rounding alone would be beyond the tolerances, which are for results of 1.
    yield Sample("many tokens, not renormalised", case(33, 6, 256, 256, 4, False, (12, 13, 14), 0.25))
    yield Sample("no tokens", case(0, 4, 32, 32, 2, True, (8, 8, 8)))
    yield Sample("one expert", case(5, 1, 32, 64, 1, False, (6, 6, 7)))
    x, gate_up, down, weights, ids, *rest = case(6, 4, 32, 32, 2, True, (3, 3, 1))
    ids = torch.zeros_like(ids, dtype=torch.int32)
    ids[:, 1] = 3
    yield Sample("two experts take all, int32", (x, gate_up, down, weights, ids, *rest))
    x, *others = case(9, 4, 32, 32, 2, True, (8, 8, 30))
    yield Sample("strided", (x.t().contiguous().t(), *others))
