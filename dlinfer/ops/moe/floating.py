"""Mixture of experts: choosing experts for each token, and running them."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op
from dlinfer.utils.type_annotation import MoeMetadata

ROUTING_TOLERANCES = {
    dtype: Tolerance(2e-6, 2e-7, "a float32 softmax of exactly converted logits")
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
}


@fused_op(tolerances=ROUTING_TOLERANCES)
def moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    """The torch op behind ``dlinfer.ops.moe_gating_topk_softmax``, which documents the arguments.

    n_groups: ``moe_metadata.router_n_groups``. Returns weights [..., topk], float32 (float64 for float64),
    and ids [..., topk], int64. Nothing is mutated. Raises OpArgumentError.
    """
    weights = router_logits.to(torch.promote_types(router_logits.dtype, torch.float32)).softmax(dim=-1)
    if n_groups < 1:
        return weights.topk(topk, dim=-1)
    group_size = router_logits.shape[-1] // n_groups
    chosen, ids = weights.unflatten(-1, (n_groups, group_size)).topk(topk // n_groups, dim=-1)
    first_of_group = torch.arange(0, n_groups * group_size, group_size, device=ids.device)
    return chosen.flatten(-2), (ids + first_of_group[:, None]).flatten(-2)


@moe_gating_topk_softmax.python_call
def _call_moe_gating_topk_softmax(
    router_logits: Tensor, topk: int, moe_metadata: MoeMetadata | None = None
) -> tuple[Tensor, Tensor]:
    """The topk experts of each token by softmax over all experts, and their probabilities.

    router_logits: [..., experts], any strides.
    topk: 1..experts.
    moe_metadata: read for its ``router_n_groups``: below 1 for none; else the experts form that many equal groups
        in order, and each gives its best topk / n_groups experts.

    Returns weights [..., topk], float32, not renormalised, and ids [..., topk], int64, both in falling order, with
    groups falling within each group. Nothing is mutated. The softmax is taken in float32, as in LMDeploy
    (``pytorch/backends/default/moe.py``) and HF transformers. Raises OpArgumentError.
    """
    n_groups = -1 if moe_metadata is None else moe_metadata.router_n_groups
    return moe_gating_topk_softmax.overload(router_logits, topk, n_groups)


_GATING = Rules("moe_gating_topk_softmax")


@moe_gating_topk_softmax.check
def _check_moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> None:
    _GATING.floating("router_logits", router_logits)
    _GATING.require(router_logits.dim() >= 1, "router_logits", "at least one dimension", router_logits.dim)
    experts = router_logits.shape[-1]
    _GATING.require(topk >= 1, "topk", "at least 1", lambda: topk)
    _GATING.require(
        topk <= experts, "topk", lambda: f"at most {experts}, the number of experts", lambda: topk
    )
    if n_groups >= 1:
        _GATING.require(
            topk % n_groups == 0, "n_groups", lambda: f"a divisor of topk = {topk}", lambda: n_groups
        )
        _GATING.require(
            experts % n_groups == 0, "n_groups", lambda: f"a divisor of {experts} experts", lambda: n_groups
        )


@moe_gating_topk_softmax.fake
def _fake_moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    shape = (*router_logits.shape[:-1], topk)
    dtype = torch.promote_types(router_logits.dtype, torch.float32)
    return router_logits.new_empty(shape, dtype=dtype), router_logits.new_empty(shape, dtype=torch.int64)


@moe_gating_topk_softmax.samples
def _moe_gating_topk_softmax_samples(make: SampleMaker) -> Iterator[Sample]:
    def logits(*shape: int, dim: int = -1) -> Tensor:
        """Each once along ``dim``, in 16 bits too: of equal ones any may be chosen."""
        return make.tensor(*shape).argsort(dim=dim).sub(shape[dim] // 2).div(8).to(make.dtype)

    yield Sample("one token", (logits(1, 8), 2, -1))
    yield Sample("many tokens", (logits(33, 60), 4, 0))
    yield Sample("no tokens", (logits(0, 8), 2, -1))
    yield Sample("3-d", (logits(1, 5, 16), 1, -1))
    yield Sample("all experts", (logits(3, 4), 4, -1))
    yield Sample("groups", (logits(7, 16), 8, 4))
    yield Sample("strided", (logits(16, 9, dim=0).t(), 3, -1))


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
    """The torch op behind ``dlinfer.ops.fused_moe``, which documents the arguments.

    Computed in float32 at least and rounded once. Returns a new tensor of hidden_states' shape and dtype.
    Nothing is mutated. Raises OpArgumentError.
    """
    check_ids(topk_ids, gate_up_weights.shape[0])
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    weights = topk_weights.to(dtype)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros(hidden_states.shape, dtype=dtype, device=hidden_states.device)
    for expert in range(gate_up_weights.shape[0]):
        token, choice = torch.where(topk_ids == expert)
        gate, up = (hidden_states[token].to(dtype) @ gate_up_weights[expert].to(dtype).t()).chunk(2, dim=-1)
        result = (functional.silu(gate) * up) @ down_weights[expert].to(dtype).t()
        out.index_add_(0, token, result * weights[token, choice, None])
    return out.to(hidden_states.dtype)


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
    """For each token, the weighted sum of its experts' gated MLPs: down @ (silu(gate @ x) * (up @ x)).

    hidden_states: [tokens, hidden], any strides.
    gate_up_weights: [experts, 2 * intermediate, hidden], gate above up; dtype of hidden_states.
    down_weights: [experts, hidden, intermediate], likewise.
    topk_weights: [tokens, topk], any floating dtype.
    topk_ids: [tokens, topk], int32 or int64, of 0..experts-1.
    renormalize: divide a token's weights by their sum.
    moe_metadata: read for its ``ep_size``. With tensor parallelism each rank passes its slice of the intermediate
        size and gets a partial sum, which the framework reduces.
    chunked_moe_layout: None.

    Returns a new tensor of hidden_states' shape and dtype. Nothing is mutated. Raises OpArgumentError;
    UnsupportedFeatureError for expert parallelism or a chunked layout.
    """
    if moe_metadata is not None and moe_metadata.ep_size > 1:
        raise UnsupportedFeatureError(
            feature=f"expert parallelism (ep_size={moe_metadata.ep_size})",
            where="dlinfer.ops.fused_moe",
            advice="set ep=1; tensor parallelism is served",
        )
    if chunked_moe_layout is not None:
        raise UnsupportedFeatureError(
            feature="a chunked weight layout",
            where="dlinfer.ops.fused_moe",
            advice="pass chunked_moe_layout=None and the experts' weights unpacked",
        )
    return fused_moe.overload(
        hidden_states, gate_up_weights, down_weights, topk_weights, topk_ids, topk, renormalize
    )


_MOE = Rules("fused_moe")


def check_ids(topk_ids: Tensor, experts: int, rules: Rules = _MOE) -> None:
    """Every id names an expert. Raises OpArgumentError. It reads the ids, so it is for kernels, not for fakes."""
    if topk_ids.numel():
        lowest, highest = (int(bound) for bound in topk_ids.aminmax())
        rules.require(
            lowest >= 0 and highest < experts,
            "topk_ids",
            lambda: f"ids of 0..{experts - 1}",
            lambda: f"ids of {lowest}..{highest}",
        )


@fused_moe.check
def _check_fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> None:
    _MOE.floating("hidden_states", hidden_states)
    _MOE.rank("hidden_states", hidden_states, 2)
    for name, weights in (("gate_up_weights", gate_up_weights), ("down_weights", down_weights)):
        _MOE.like(name, weights, "hidden_states", hidden_states)
        _MOE.rank(name, weights, 3)
        _MOE.size(name, weights, 0, gate_up_weights.shape[0], "the number of experts")
    tokens, hidden = hidden_states.shape
    intermediate = down_weights.shape[2]
    _MOE.size("gate_up_weights", gate_up_weights, 2, hidden, "the hidden size")
    _MOE.size("gate_up_weights", gate_up_weights, 1, 2 * intermediate, "twice the intermediate size")
    _MOE.size("down_weights", down_weights, 1, hidden, "the hidden size")
    _MOE.floating("topk_weights", topk_weights)
    _MOE.integer("topk_ids", topk_ids)
    for name, choice in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        _MOE.same_device(name, choice, "hidden_states", hidden_states)
        _MOE.rank(name, choice, 2)
        _MOE.size(name, choice, 0, tokens, "the tokens of hidden_states")
        _MOE.size(name, choice, 1, topk, "topk")


@fused_moe.fake
def _fake_fused_moe(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk: int,
    renormalize: bool,
) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


@fused_moe.samples
def _fused_moe_samples(make: SampleMaker) -> Iterator[Sample]:
    def case(
        tokens: int, experts: int, hidden: int, intermediate: int, topk: int, renormalize: bool
    ) -> tuple:
        logits = torch.randn(tokens, experts, generator=make.generator)
        weights, ids = logits.softmax(-1).topk(topk)
        return (
            make.tensor(tokens, hidden),
            make.tensor(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
            make.tensor(experts, hidden, intermediate, scale=intermediate**-0.5),
            weights.to(make.device),
            ids.to(make.device),
            topk,
            renormalize,
        )

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
