"""The router of a mixture of experts, and code shared by the ops that run experts."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import OpSpec, Tolerance, fused_op
from dlinfer.utils.type_annotation import MoeMetadata


@fused_op(tolerances=Tolerance(2e-6, 2e-7, "a float32 softmax of exactly converted logits"))
def moe_gating_topk_softmax(router_logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
    """The torch op behind ``dlinfer.ops.moe_gating_topk_softmax``. n_groups: ``moe_metadata.router_n_groups``."""
    weights = router_logits.to(torch.promote_types(router_logits.dtype, torch.float32)).softmax(dim=-1)
    if n_groups < 1:
        return weights.topk(topk, dim=-1)
    group_size = router_logits.shape[-1] // n_groups
    chosen, ids = torch.unflatten(weights, -1, (n_groups, group_size)).topk(topk // n_groups, dim=-1)
    first_of_group = torch.arange(0, n_groups * group_size, group_size, device=ids.device)
    return chosen.flatten(-2), (ids + first_of_group[:, None]).flatten(-2)


@moe_gating_topk_softmax.python_call
def _call_moe_gating_topk_softmax(
    router_logits: Tensor, topk: int, moe_metadata: MoeMetadata | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the topk experts of each token by softmax over all experts; return their probabilities and ids.

    router_logits: [..., experts], any strides.
    topk: 1..experts.
    moe_metadata: only its ``router_n_groups`` is read; below 1 means no groups. Else the experts form that many groups
        of equal size, in order, and the best topk / router_n_groups experts of each group are chosen.

    Returns weights [..., topk], float32, not renormalised, and ids [..., topk], int64. Both are sorted from the highest
    weight to the lowest; with groups, within each group. Nothing is mutated. The softmax is taken in float32, as in
    LMDeploy (``pytorch/backends/default/moe.py``) and HF transformers. Raises OpArgumentError.
    """
    n_groups = -1 if moe_metadata is None else moe_metadata.router_n_groups
    return moe_gating_topk_softmax.overload(router_logits, topk, n_groups)


moe_gating_topk_softmax.takes(
    router_logits="float [..., experts]",
)


@moe_gating_topk_softmax.check
def _check_moe_gating_topk_softmax(rules: Rules, router_logits: Tensor, topk: int, n_groups: int) -> None:
    experts = router_logits.shape[-1]
    rules.require(topk >= 1, "topk", "at least 1", lambda: topk)
    rules.require(topk <= experts, "topk", lambda: f"at most {experts}, the number of experts", lambda: topk)
    if n_groups >= 1:
        rules.require(
            topk % n_groups == 0, "n_groups", lambda: f"a divisor of topk = {topk}", lambda: n_groups
        )
        rules.require(
            experts % n_groups == 0, "n_groups", lambda: f"a divisor of {experts} experts", lambda: n_groups
        )


@moe_gating_topk_softmax.fake
def _fake_moe_gating_topk_softmax(router_logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    shape = (*router_logits.shape[:-1], topk)
    dtype = torch.promote_types(router_logits.dtype, torch.float32)
    return router_logits.new_empty(shape, dtype=dtype), router_logits.new_empty(shape, dtype=torch.int64)


@moe_gating_topk_softmax.samples
def _moe_gating_topk_softmax_samples(make: SampleMaker) -> Iterator[Sample]:
    def logits(*shape: int, dim: int = -1) -> Tensor:
        """Return logits that differ along ``dim`` even in 16 bits, because a kernel may choose any of equal logits."""
        return make.tensor(*shape).argsort(dim=dim).sub(shape[dim] // 2).div(8).to(make.dtype)

    yield Sample("one token", (logits(1, 8), 2, -1))
    yield Sample("many tokens", (logits(33, 60), 4, 0))
    yield Sample("no tokens", (logits(0, 8), 2, -1))
    yield Sample("3-d", (logits(1, 5, 16), 1, -1))
    yield Sample("all experts", (logits(3, 4), 4, -1))
    yield Sample("groups", (logits(7, 16), 8, 4))
    yield Sample("strided", (logits(16, 9, dim=0).t(), 3, -1))


# --- for ops that run experts


Product = Callable[[Tensor, int], Tensor]
"""A function of (rows, expert). It returns the rows times that expert's weight, in float32 at least."""


def matrix_products(dtype: torch.dtype, weights: Tensor, bias: Tensor | None = None) -> Product:
    """Return the product by weights [experts, out, in], computed in ``dtype``, plus the expert's row of bias."""

    def product(rows: Tensor, expert: int) -> Tensor:
        result = rows.to(dtype) @ weights[expert].to(dtype).t()
        return result if bias is None else result + bias[expert].to(dtype)

    return product


def silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. The default for ``activated`` in ``routed``."""
    return functional.silu(gate) * up


def routed(
    hidden_states: Tensor,
    experts: int,
    topk_weights: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    gate_up: Product,
    down: Product,
    activated: Callable[[Tensor, Tensor], Tensor] = silu_gated,
) -> Tensor:
    """Return each token's weighted sum of its experts' gated MLPs, summed in float32 at least and rounded once.

    experts: the number of experts.
    gate_up: takes (rows, expert), and returns the expert's gate projection and up projection of the rows, side by side.
    activated: takes (gate, up), and returns the rows for ``down``.
    down: takes (rows, expert), and returns the expert's down projection of the rows.
    """
    weights = topk_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros(hidden_states.shape, dtype=weights.dtype, device=hidden_states.device)
    for expert in range(experts):
        token, choice = torch.where(topk_ids == expert)
        gate, up = gate_up(hidden_states[token], expert).chunk(2, dim=-1)
        result = down(activated(gate, up), expert)
        out.index_add_(0, token, result.to(out.dtype) * weights[token, choice, None])
    return out.to(hidden_states.dtype)


def check_ids(topk_ids: Tensor, experts: int, rules: Rules) -> None:
    """Raise OpArgumentError if an id is not in 0..experts-1. Reads the ids' values, so only kernels call this check."""
    if topk_ids.numel():
        lowest, highest = (int(bound) for bound in topk_ids.aminmax())
        rules.require(
            lowest >= 0 and highest < experts,
            "topk_ids",
            lambda: f"ids of 0..{experts - 1}",
            lambda: f"ids of {lowest}..{highest}",
        )


def refuse_expert_parallel(op: OpSpec, moe_metadata: MoeMetadata | None, advice: str = "set ep=1") -> None:
    """Raise UnsupportedFeatureError if the experts are distributed over several ranks."""
    if moe_metadata is not None and moe_metadata.ep_size > 1:
        raise UnsupportedFeatureError(
            feature=f"expert parallelism (ep_size={moe_metadata.ep_size})",
            where=f"dlinfer.ops.{op.name}",
            advice=advice,
        )


def choices(make: SampleMaker, tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    """Return (topk_weights, topk_ids) of a sample."""
    weights, ids = torch.randn(tokens, experts, generator=make.generator).softmax(-1).topk(topk)
    return weights.to(make.device), ids.to(make.device)
