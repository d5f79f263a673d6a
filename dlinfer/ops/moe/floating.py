"""Mixture of experts with floating-point weights."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.ops.moe.routing import check_ids, choices, matrix_products, refuse_expert_parallel, routed
from dlinfer.utils.type_annotation import MoeMetadata

_ROUNDING = "an expert's activation and result may be rounded to the tensors' dtype before the sum"
TOLERANCES = {
    torch.float32: Tolerance(2e-5, 2e-5, "two float32 sums over hidden and intermediate size, in any order"),
    torch.float16: Tolerance(2e-3, 2e-3, _ROUNDING),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    """The torch op behind ``dlinfer.ops.fused_moe``."""
    check_ids(topk_ids, gate_up_weights.shape[0], fused_moe.rules)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)

    products = matrix_products(wide, gate_up_weights), matrix_products(wide, down_weights)
    return routed(hidden_states, gate_up_weights.shape[0], topk_weights, topk_ids, renormalize, *products)


@fused_moe.python_call
def _call_fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
    moe_metadata: MoeMetadata | None = None,
    chunked_moe_layout: object | None = None,
) -> Tensor:
    """Compute, for each token, the weighted sum of its experts' gated MLPs: down @ (silu(gate @ x) * (up @ x)).

    hidden_states: [tokens, hidden], any strides.
    gate_up_weights: [experts, 2 * intermediate, hidden], gate's rows before up's; dtype of hidden_states.
    down_weights: [experts, hidden, intermediate], dtype of hidden_states.
    topk_weights: [tokens, topk], any floating dtype.
    topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    renormalize: divide a token's weights by their sum.
    moe_metadata: only its ``ep_size`` is read. With tensor parallelism each rank passes its slice of the intermediate
        size and gets a partial sum, which the framework reduces.
    chunked_moe_layout: must be None.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Raises OpArgumentError. Raises
    UnsupportedFeatureError for expert parallelism or a chunked layout.
    """
    refuse_expert_parallel(fused_moe, moe_metadata, "set ep=1, or use tensor parallelism instead")
    if chunked_moe_layout is not None:
        raise UnsupportedFeatureError(
            feature="a chunked weight layout",
            where="dlinfer.ops.fused_moe",
            advice="pass chunked_moe_layout=None and the experts' weights unpacked",
        )
    return fused_moe.overload(
        hidden_states, gate_up_weights, down_weights, topk_weights, topk_ids, topk, renormalize
    )


fused_moe.takes(
    hidden_states="float [tokens, hidden]",
    gate_up_weights="like hidden_states [experts, 2 * intermediate, hidden]",
    down_weights="like hidden_states [experts, hidden, intermediate]",
    topk_weights="float on hidden_states [tokens, topk]",
    topk_ids="int on hidden_states [tokens, topk]",
    returns="like hidden_states [tokens, hidden]",
)


@fused_moe.samples
def _fused_moe_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        tokens: int, experts: int, hidden: int, intermediate: int, topk: int, renormalize: bool
    ) -> tuple[Any, ...]:
        routes = choices(make, tokens, experts, topk)
        x = make.tensor(tokens, hidden)
        gate_up = make.tensor(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
        down = make.tensor(experts, hidden, intermediate, scale=intermediate**-0.5)
        return x, gate_up, down, *routes, topk, renormalize

    yield Sample("one token", case(1, 8, 32, 48, 2, True))
    yield Sample("many tokens, not renormalised", case(33, 6, 32, 16, 4, False))
    yield Sample("no tokens", case(0, 4, 16, 16, 2, True))
    yield Sample("one expert", case(5, 1, 16, 32, 1, False))
    yield Sample("odd sizes", case(7, 5, 19, 13, 2, True))
    x, gate_up, down, weights, ids, topk, renormalize = case(6, 4, 32, 16, 2, True)
    ids = torch.zeros_like(ids, dtype=torch.int32)
    ids[:, 1] = 3
    yield Sample("two experts take all, int32", (x, gate_up, down, weights, ids, topk, renormalize))
    transposed = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    yield Sample("transposed weights", (x, transposed, down, weights.to(x.dtype), ids, topk, renormalize))
