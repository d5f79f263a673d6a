"""dlinfer's own ops: every sample of every op that the engine takes, as their reference computes it."""

import pytest
import torch

from dlinfer import ops
from dlinfer.errors import GraphFallbackError
from dlinfer.ops import fused_moe
from dlinfer.ops.core.samples import SampleMaker
from tests.vendor.openvino.lowering import close, lowered, same

TAKEN = """rms_norm add_rms_norm apply_rotary_pos_emb apply_rotary_pos_emb_interleaved silu_and_mul silu_mul gelu_mul
linear linears weight_quant_matmul moe_gating_topk_softmax fused_moe""".split()

REFUSED = {("weight_quant_matmul", "a last group that is shorter"): "the last group of the packed weight"}


def samples(name, dtype):
    return list(ops.registry()[name].sample_inputs(SampleMaker(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TAKEN)
def test_samples(name, dtype):
    op = ops.registry()[name]
    allowed = op.tolerances[dtype]
    for sample in samples(name, dtype):
        tensors = [one for one in sample.args if isinstance(one, torch.Tensor)]
        if any(one.numel() == 0 for one in tensors):
            continue  # a size of 0 is a constant: it is tested where sizes vary, below
        if (name, sample.name) in REFUSED:
            continue

        def call(*given, sample=sample):
            left = iter(given)
            results = op.overload(*_replaced(sample.args, left))
            if name == "moe_gating_topk_softmax":  # of equal experts either may be chosen
                return results[0], given[0].gather(-1, results[1])
            return results

        # A row stride of its own would be a symbol that is no input's size; the engine makes inputs contiguous.
        flat = [one.contiguous() for argument in sample.args for one in _tensors(argument)]
        # The reference rounds where its docstring says; the engine may keep more digits, never fewer.
        same(call, *flat, fixed=_fixed(flat), rtol=2 * allowed.rtol, atol=2 * allowed.atol)


def _fixed(tensors):
    """Every size but the number of tokens, as in a model."""
    tokens = tensors[0].shape[0]
    leading = {one.shape[0] for one in tensors if one.dim()} - {tokens}
    return leading | {size for one in tensors for size in one.shape[1:]}


def _tensors(argument):
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [one for item in argument for one in _tensors(item)] if isinstance(argument, list) else []


def _replaced(argument, left):
    if isinstance(argument, torch.Tensor):
        return next(left)
    if isinstance(argument, (list, tuple)):
        return [_replaced(item, left) for item in argument]
    return argument


@pytest.mark.parametrize("groups", [-1, 2])
def test_logits_of_experts_that_are_not_finite(groups):
    logits = torch.randn(5, 8)
    logits[1, 3], logits[2, 0], logits[3], logits[4, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    gating = torch.ops.dlinfer.moe_gating_topk_softmax.default
    same(lambda x: gating(x, 4, groups)[0], logits, fixed=(8,))


def test_no_tokens():
    experts, table = torch.randn(4, 12, 8), torch.randn(4, 8, 6)

    def layer(x, gate_up, down, ids, weights):
        normal = ops.rms_norm(x, gate_up[0, 0], 1e-6)
        return ops.fused_moe(normal, gate_up, down, weights, ids, 2, True), ops.silu_and_mul(x)

    ids, weights = torch.randint(4, (5, 2)), torch.rand(5, 2)
    compiled, _ = lowered(layer, torch.randn(5, 8), experts, table, ids, weights, fixed=(2, 4, 6, 8, 12))
    for rows in (0, 1, 3):
        given = torch.randn(rows, 8), experts, table, ids[:rows], weights[:rows]
        for one, other in zip(compiled(*given), layer(*given), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_an_expert_that_overflows_reaches_only_who_chose_it():
    hidden, gate_up, down = torch.randn(2, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    hidden.abs_()
    gate_up[3] = 1e30
    args = hidden, gate_up, down, torch.rand(2, 2), torch.tensor([[0, 1], [2, 3]])
    compiled, _ = lowered(lambda *given: fused_moe(*given, 2, True), *args, fixed=(4, 8, 12, 6, 2))
    (ours,), expected = compiled(*args), fused_moe(*args, 2, True)
    assert expected[0].isfinite().all()
    assert not expected[1].isfinite().any()
    close(ours[0], expected[0])
    assert not ours[1].isfinite().any()


def test_an_infinite_share_of_an_expert_is_no_share_of_others():
    given = [torch.ones(3, 8), torch.ones(4, 16, 8), torch.ones(4, 8, 8), torch.ones(3, 2)]
    given[3][0, 1], given[3][1, 0], given[3][2, 1] = torch.inf, -torch.inf, torch.nan
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
    same(lambda *args: torch.ops.dlinfer.fused_moe(*args, 2, False), *given, ids, fixed=(4, 8, 16, 2))


@pytest.mark.parametrize(("op", "name"), REFUSED)
def test_what_is_not_taken_is_told(op, name):
    (sample,) = (one for one in samples(op, torch.float32) if one.name == name)
    tensors = [one for one in sample.args if isinstance(one, torch.Tensor)]

    def call(*given):
        return ops.registry()[op].overload(*_replaced(sample.args, iter(given)))

    with pytest.raises(GraphFallbackError, match=REFUSED[op, name]):
        lowered(call, *tensors, fixed=_fixed(tensors))
