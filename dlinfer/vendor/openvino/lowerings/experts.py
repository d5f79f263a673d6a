"""Mixture of experts: every expert computes every token. The results of experts that a token did not choose count 0.

OpenVINO has no grouped product. Computing all experts multiplies the work by experts / topk, but reads the weights
once; docs/vendors/openvino.md has the costs."""

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.activation import where_defined
from dlinfer.vendor.openvino.lowerings.fused import silu_and_mul
from dlinfer.vendor.openvino.lowerings.matrix import product
from dlinfer.vendor.openvino.lowerings.ordering import sorted_first
from dlinfer.vendor.openvino.lowerings.places import inside
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Call, lowers

dlinfer = torch.ops.dlinfer
I64, F32 = ov.Type.i64, ov.Type.f32


def _known_experts(call: Call) -> str | None:
    known = fixed_size(call.fake("router_logits").shape[-1]) is not None
    return None if known else "the number of experts is not fixed"


@lowers(dlinfer.moe_gating_topk_softmax.default, refuses=_known_experts)
def gating(b: Builder, logits: Output, topk: int, groups: int) -> list[Output]:
    last = rank(logits) - 1
    probabilities = op.softmax(b.cast(logits, F32), last).output(0)
    if groups < 1:
        weights, ids = sorted_first(b, probabilities, topk, last, True)
        return [where_defined(b, logits, last, weights), ids]
    experts = b.size(logits, -1)
    assert isinstance(experts, int)
    size = experts // groups
    sizes = [b.size(logits, dim) for dim in range(last)]
    grouped = op.reshape(probabilities, b.numbers([*sizes, groups, size]), False).output(0)
    weights, ids = sorted_first(b, grouped, topk // groups, last + 1, True)
    first = b.constant(torch.arange(0, experts, size).unsqueeze(1))
    flat = b.numbers([*sizes, topk])
    weights, ids = (op.reshape(value, flat, False).output(0) for value in (weights, op.add(ids, first)))
    return [where_defined(b, logits, last, weights), ids]


def _known_sizes(call: Call) -> str | None:
    sizes = (*call.fake("gate_up_weights").shape, *call.fake("down_weights").shape)
    return (
        None
        if all(fixed_size(size) is not None for size in sizes)
        else "the size of the weights is not fixed"
    )


@lowers(dlinfer.fused_moe.default, refuses=_known_sizes)
def fused_moe(
    b: Builder, x: Output, gate_up: Output, down: Output, weights: Output, ids: Output, *, renormalize: bool
) -> Output:
    experts, hidden = (fixed_size(b.call.fake("down_weights").shape[dim]) for dim in (0, 1))
    assert experts is not None and hidden is not None
    # If the batched product broadcasts x itself and the number of tokens varies, its result has 0 rows.
    every = op.broadcast(op.unsqueeze(x, b.axes([0])), b.numbers([experts, b.size(x, 0), hidden])).output(0)
    inner = silu_and_mul(b, product(every, gate_up, False, True))
    results = product(inner, down, False, True)  # [experts, tokens, hidden]
    shares, chosen = _shares(b, weights, ids, experts, renormalize)
    # A result that overflowed must not reach tokens that did not choose the expert: 0 times infinity is NaN.
    weighted = op.select(chosen, op.multiply(b.cast(results, F32), shares), b.scalar(0.0, F32))
    return b.cast(op.reduce_sum(weighted, b.axes([0]), False).output(0), b.kind)


def _shares(b: Builder, weights: Output, ids: Output, experts: int, renormalize: bool) -> list[Output]:
    """Return two tensors [experts, tokens, 1]: an expert's weight for a token, and whether the token chose it."""
    weights = b.cast(weights, F32)
    if renormalize:
        weights = op.divide(weights, op.reduce_sum(weights, b.axes([-1]), True)).output(0)
    ids = inside(b, ids, experts, experts, negative=False)
    chosen = op.one_hot(ids, b.scalar(experts, I64), b.scalar(1.0, F32), b.scalar(0.0, F32), -1)
    # Not by a product: 0 times infinity is NaN.
    masked = op.select(op.greater(chosen, b.scalar(0.0, F32)), op.unsqueeze(weights, b.axes([2])), chosen)
    tables = [
        op.reduce_sum(masked, b.axes([1]), False),
        op.greater(op.reduce_sum(chosen, b.axes([1]), False), b.scalar(0.0, F32)),
    ]
    turned = [op.transpose(table, b.axes([1, 0])) for table in tables]
    return [op.unsqueeze(table, b.axes([2])).output(0) for table in turned]
