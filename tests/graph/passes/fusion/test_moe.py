"""Blocks of experts as transformers writes them."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional
from transformers import MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from dlinfer.graph.passes.functionalize_writes import FUNCTIONALIZE_WRITES
from dlinfer.graph.passes.fusion.moe import MOE_EXPERTS, MOE_GATING
from tests.graph.passes.fusion.fusing import changes, clean, filled, fired, golden, tiny

STEPS = (FUNCTIONALIZE_WRITES, MOE_GATING, MOE_EXPERTS)
SIZES: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

# float32: the same sums in another order. bfloat16: transformers rounds each expert's result, and in some blocks
# the weights, to 8 bits before the sum over experts; the op keeps them in float32 and rounds once.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


# --- gating


def gating(logits):
    weights, ids = torch.topk(functional.softmax(logits.float(), dim=-1), 2, dim=-1)
    return weights * 2, ids + 1


def test_gating():
    assert_expected_inline(
        golden(clean(gating, torch.randn(5, 8).bfloat16()), MOE_GATING),
        """\
l_logits_: bf16[s0, s1]
to = aten.to.dtype(l_logits_, float32) -> f32[s0, s1]
softmax = aten.softmax.int(to, -1) -> f32[s0, s1]
topk = aten.topk(softmax, 2) -> (f32[s0, 2], i64[s0, 2])
getitem = operator.getitem(topk, 0) -> f32[s0, 2]
getitem_1 = operator.getitem(topk, 1) -> i64[s0, 2]
mul = aten.mul.Tensor(getitem, 2) -> f32[s0, 2]
add = aten.add.Tensor(getitem_1, 1) -> i64[s0, 2]
return [mul, add]
--->
l_logits_: bf16[s0, s1]
moe_gating_topk_softmax_default = dlinfer.moe_gating_topk_softmax(l_logits_, 2, -1) -> (f32[s0, 2], i64[s0,
    2])
getitem = operator.getitem(moe_gating_topk_softmax_default, 0) -> f32[s0, 2]
getitem_1 = operator.getitem(moe_gating_topk_softmax_default, 1) -> i64[s0, 2]
mul = aten.mul.Tensor(getitem, 2) -> f32[s0, 2]
add = aten.add.Tensor(getitem_1, 1) -> i64[s0, 2]
return [mul, add]
""",
    )


def with_dtype(logits):
    return torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 3)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("code", [gating, with_dtype])
def test_gating_spellings(code, dtype):
    count, got, want = changes(clean(code, torch.randn(2, 5, 8).to(dtype)), MOE_GATING)
    assert count == {"moe_gating": 1}
    # The cpu's kernel has an exp of its own, within two units in the last place; experts are the same.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def probabilities_used_elsewhere(logits):
    probabilities = functional.softmax(logits, dim=-1)
    return *torch.topk(probabilities, 2), probabilities.mean(0)


def smallest(logits):
    return torch.topk(functional.softmax(logits, dim=-1), 2, largest=False)


def over_tokens(logits):
    return torch.topk(functional.softmax(logits, dim=0), 2, dim=0)


def sigmoid(logits):
    return torch.topk(logits.sigmoid(), 2)


def low_precision(logits):
    return torch.topk(functional.softmax(logits.bfloat16(), dim=-1), 2)


@pytest.mark.parametrize(
    "code", [probabilities_used_elsewhere, smallest, over_tokens, sigmoid, low_precision]
)
def test_no_gating(code):
    assert fired(code, torch.randn(5, 8), steps=STEPS) == {}


# --- experts


def block(kind, config, implementation: str, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    return filled(kind(tiny(config, **SIZES, **options, experts_implementation=implementation)), dtype)


def test_grouped():
    """transformers' grouped_mm."""
    mixtral = block(MixtralSparseMoeBlock, MixtralConfig, "grouped_mm", torch.bfloat16)
    one = clean(mixtral, torch.randn(2, 5, 32, dtype=torch.bfloat16))
    assert_expected_inline(
        golden(one, *STEPS),
        """\
l_hidden_states_: bf16[s0, s1, 32]
l_self_modules_gate_parameters_weight_: bf16[4, 32] static
l_self_modules_experts_parameters_gate_up_proj_: bf16[4, 96, 32] static
l_self_modules_experts_parameters_down_proj_: bf16[4, 32, 48] static
view = aten.view(l_hidden_states_, [-1, 32]) -> bf16[s0*s1, 32]
linear = aten.linear(view, l_self_modules_gate_parameters_weight_) -> bf16[s0*s1, 4]
to = aten.to.dtype(linear, float32) -> f32[s0*s1, 4]
softmax = aten.softmax.int(to, -1) -> f32[s0*s1, 4]
topk = aten.topk(softmax, 2) -> (f32[s0*s1, 2], i64[s0*s1, 2])
getitem = operator.getitem(topk, 0) -> f32[s0*s1, 2]
getitem_1 = operator.getitem(topk, 1) -> i64[s0*s1, 2]
sum_1 = aten.sum.dim_IntList(getitem, [-1], True) -> f32[s0*s1, 1]
div_ = aten.div_.Tensor(getitem, sum_1) -> f32[s0*s1, 2]
mul = operator.mul(s0, s1) -> s0*s1
reshape_1 = aten.reshape(div_, [-1]) -> f32[2*s0*s1]
reshape_2 = aten.reshape(getitem_1, [-1]) -> i64[2*s0*s1]
sort = aten.sort(reshape_2) -> (i64[2*s0*s1], i64[2*s0*s1])
getitem_2 = operator.getitem(sort, 0) -> i64[2*s0*s1]
getitem_3 = operator.getitem(sort, 1) -> i64[2*s0*s1]
floor_divide = aten.floor_divide(getitem_3, 2) -> i64[2*s0*s1]
index = aten.index.Tensor(view, [floor_divide]) -> bf16[2*s0*s1, 32]
index_1 = aten.index.Tensor(reshape_1, [getitem_3]) -> f32[2*s0*s1]
to_1 = aten.to.dtype(getitem_2, float32) -> f32[2*s0*s1]
histc = aten.histc(to_1, 4, 0, 3) -> f32[4]
cumsum = aten.cumsum(histc, 0, dtype=int32) -> i32[4]
transpose = aten.transpose.int(l_self_modules_experts_parameters_gate_up_proj_, -2, -1) -> bf16[4, 32, 96]
_grouped_mm = aten._grouped_mm(index, transpose, cumsum) -> bf16[2*s0*s1, 96]
chunk = aten.chunk(_grouped_mm, 2, -1) -> (bf16[2*s0*s1, 48], bf16[2*s0*s1, 48])
getitem_4 = operator.getitem(chunk, 0) -> bf16[2*s0*s1, 48]
getitem_5 = operator.getitem(chunk, 1) -> bf16[2*s0*s1, 48]
silu = aten.silu(getitem_4) -> bf16[2*s0*s1, 48]
mul_1 = aten.mul.Tensor(silu, getitem_5) -> bf16[2*s0*s1, 48]
transpose_1 = aten.transpose.int(l_self_modules_experts_parameters_down_proj_, -2, -1) -> bf16[4, 48, 32]
_grouped_mm_1 = aten._grouped_mm(mul_1, transpose_1, cumsum) -> bf16[2*s0*s1, 32]
unsqueeze = aten.unsqueeze(index_1, -1) -> f32[2*s0*s1, 1]
mul_2 = aten.mul.Tensor(_grouped_mm_1, unsqueeze) -> f32[2*s0*s1, 32]
empty_like = aten.empty_like(getitem_3, pin_memory=False) -> i64[2*s0*s1]
mul_3 = operator.mul(2, s0) -> 2*s0
mul_4 = operator.mul(mul_3, s1) -> 2*s0*s1
arange = aten.arange(mul_4, device=cpu, pin_memory=False) -> i64[2*s0*s1]
index_put_ = aten.index_put_(empty_like, [getitem_3], arange) -> i64[2*s0*s1]
index_2 = aten.index.Tensor(mul_2, [index_put_]) -> f32[2*s0*s1, 32]
view_1 = aten.view(index_2, [mul, 2, 32]) -> f32[s0*s1, 2, 32]
sum_2 = aten.sum.dim_IntList(view_1, [1]) -> f32[s0*s1, 32]
to_4 = aten.to.dtype(sum_2, bfloat16) -> bf16[s0*s1, 32]
reshape_3 = aten.reshape(to_4, [s0, s1, 32]) -> bf16[s0, s1, 32]
return [reshape_3]
--->
l_hidden_states_: bf16[s0, s1, 32]
l_self_modules_gate_parameters_weight_: bf16[4, 32] static
l_self_modules_experts_parameters_gate_up_proj_: bf16[4, 96, 32] static
l_self_modules_experts_parameters_down_proj_: bf16[4, 32, 48] static
view = aten.view(l_hidden_states_, [-1, 32]) -> bf16[s0*s1, 32]
linear = aten.linear(view, l_self_modules_gate_parameters_weight_) -> bf16[s0*s1, 4]
moe_gating_topk_softmax_default = dlinfer.moe_gating_topk_softmax(linear, 2, -1) -> (f32[s0*s1, 2], i64[s0*s1,
    2])
getitem = operator.getitem(moe_gating_topk_softmax_default, 0) -> f32[s0*s1, 2]
getitem_1 = operator.getitem(moe_gating_topk_softmax_default, 1) -> i64[s0*s1, 2]
fused_moe_default = dlinfer.fused_moe(view, l_self_modules_experts_parameters_gate_up_proj_,
    l_self_modules_experts_parameters_down_proj_, getitem, getitem_1, 2, True) -> bf16[s0*s1, 32]
reshape_3 = aten.reshape(fused_moe_default, [s0, s1, 32]) -> bf16[s0, s1, 32]
return [reshape_3]
""",
    )


BLOCKS = [
    (MixtralSparseMoeBlock, MixtralConfig, {}),
    (Qwen2MoeSparseMoeBlock, Qwen2MoeConfig, {}),
    (Qwen2MoeSparseMoeBlock, Qwen2MoeConfig, {"norm_topk_prob": True}),
    (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, {"norm_topk_prob": True}),
    (OlmoeSparseMoeBlock, OlmoeConfig, {}),
]


# Each kind of block once, and each way to compute it; the others are combinations of these.
QUICK = {(BLOCKS[0][0], "batched_mm"), *((kind, "grouped_mm") for kind, _, _ in BLOCKS)}


@pytest.mark.parametrize(
    ("kind", "config", "options", "implementation", "dtype"),
    [
        pytest.param(*block, way, dtype, marks=() if quick else pytest.mark.full)
        for block in BLOCKS
        for way in ("grouped_mm", "batched_mm")
        for dtype in TOLERANCES
        for quick in [(block[0], way) in QUICK and dtype is torch.float32]
    ],
)
def test_transformers(kind, config, options, implementation, dtype):
    one = clean(block(kind, config, implementation, dtype, **options), torch.randn(2, 5, 32, dtype=dtype))
    count, got, want = changes(one, *STEPS)
    assert (count["moe_gating"], count["moe_experts"]) == (1, 1)
    assert one.count("dlinfer.fused_moe") == 1
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


def test_the_division_goes_into_the_op_where_nothing_is_rounded_after_it():
    one = clean(block(MixtralSparseMoeBlock, MixtralConfig, "grouped_mm"), torch.randn(2, 5, 32))
    changes(one, *STEPS)
    (fused,) = (node for node in one.graph_module.graph.nodes if "fused_moe" in node.name)
    assert fused.args[-1] is True
    assert one.count("aten.div.Tensor") == 0

    qwen = block(Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, "grouped_mm", torch.bfloat16, norm_topk_prob=True)
    one = clean(qwen, torch.randn(2, 5, 32, dtype=torch.bfloat16))
    changes(one, *STEPS)
    (fused,) = (node for node in one.graph_module.graph.nodes if "fused_moe" in node.name)
    assert fused.args[-1] is False
    assert one.count("aten.div.Tensor") == 1


def test_the_loop_over_experts_cannot_be_one_graph():
    with pytest.raises(TorchDynamoException):
        clean(block(MixtralSparseMoeBlock, MixtralConfig, "eager"), torch.randn(2, 5, 32))


# --- what must not match


def batched(x, ids, weights, gate_up, down, *, activation=functional.silu, repeats=2):
    """transformers' batched_mm in short."""
    flat = ids.reshape(-1)
    both = torch.bmm(gate_up[flat], x.repeat_interleave(repeats, dim=0).unsqueeze(-1)).squeeze(-1)
    gate, up = both.chunk(2, dim=-1)
    out = torch.bmm(down[flat], (activation(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1).unsqueeze(-1)).view(x.shape[0], 2, x.shape[1]).sum(1)


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    given = [
        torch.randn(5, 8),
        torch.randint(0, 4, (5, 2)),
        torch.rand(5, 2),
        torch.randn(4, 12, 8),
        torch.randn(4, 8, 6),
    ]
    for one in given[1:]:
        for dim in range(one.dim()):
            if one.shape[0] == 4 or dim == 1:
                torch._dynamo.mark_static(one, dim)
    return given


def test_batched():
    assert_expected_inline(
        golden(clean(batched, *operands()), *STEPS),
        """\
l_ids_: i64[s0, 2]
l_gate_up_: f32[4, 12, 8]
l_x_: f32[s0, 8]
l_down_: f32[4, 8, 6]
l_weights_: f32[s0, 2]
reshape = aten.reshape(l_ids_, [-1]) -> i64[2*s0]
index = aten.index.Tensor(l_gate_up_, [reshape]) -> f32[2*s0, 12, 8]
repeat_interleave = aten.repeat_interleave.self_int(l_x_, 2, 0) -> f32[2*s0, 8]
unsqueeze = aten.unsqueeze(repeat_interleave, -1) -> f32[2*s0, 8, 1]
bmm = aten.bmm(index, unsqueeze) -> f32[2*s0, 12, 1]
squeeze = aten.squeeze.dim(bmm, -1) -> f32[2*s0, 12]
chunk = aten.chunk(squeeze, 2, -1) -> (f32[2*s0, 6], f32[2*s0, 6])
getitem = operator.getitem(chunk, 0) -> f32[2*s0, 6]
getitem_1 = operator.getitem(chunk, 1) -> f32[2*s0, 6]
index_1 = aten.index.Tensor(l_down_, [reshape]) -> f32[2*s0, 8, 6]
silu = aten.silu(getitem) -> f32[2*s0, 6]
mul = aten.mul.Tensor(silu, getitem_1) -> f32[2*s0, 6]
unsqueeze_1 = aten.unsqueeze(mul, -1) -> f32[2*s0, 6, 1]
bmm_1 = aten.bmm(index_1, unsqueeze_1) -> f32[2*s0, 8, 1]
squeeze_1 = aten.squeeze.dim(bmm_1, -1) -> f32[2*s0, 8]
reshape_1 = aten.reshape(l_weights_, [-1]) -> f32[2*s0]
unsqueeze_2 = aten.unsqueeze(reshape_1, -1) -> f32[2*s0, 1]
mul_1 = aten.mul.Tensor(squeeze_1, unsqueeze_2) -> f32[2*s0, 8]
view = aten.view(mul_1, [s0, 2, 8]) -> f32[s0, 2, 8]
sum_1 = aten.sum.dim_IntList(view, [1]) -> f32[s0, 8]
return [sum_1]
--->
l_ids_: i64[s0, 2]
l_gate_up_: f32[4, 12, 8]
l_x_: f32[s0, 8]
l_down_: f32[4, 8, 6]
l_weights_: f32[s0, 2]
fused_moe_default = dlinfer.fused_moe(l_x_, l_gate_up_, l_down_, l_weights_, l_ids_, 2, False) -> f32[s0, 8]
return [fused_moe_default]
""",
    )


def test_batched_in_short():
    count, got, want = changes(clean(batched, *operands()), *STEPS)
    assert count == {"moe_experts": 1}
    torch.testing.assert_close(got, want, **TOLERANCES[torch.float32])


def other_activation(*given):
    return batched(*given, activation=functional.relu)


def other_ids_for_down(x, ids, weights, gate_up, down):
    flat, other = ids.reshape(-1), ids.flip(1).reshape(-1)
    both = torch.bmm(gate_up[flat], x.repeat_interleave(2, dim=0).unsqueeze(-1)).squeeze(-1)
    gate, up = both.chunk(2, dim=-1)
    out = torch.bmm(down[other], (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1).unsqueeze(-1)).view(x.shape[0], 2, x.shape[1]).sum(1)


def up_first(x, ids, weights, gate_up, down):
    flat = ids.reshape(-1)
    both = torch.bmm(gate_up[flat], x.repeat_interleave(2, dim=0).unsqueeze(-1)).squeeze(-1)
    up, gate = both.chunk(2, dim=-1)
    out = torch.bmm(down[flat], (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1).unsqueeze(-1)).view(x.shape[0], 2, x.shape[1]).sum(1)


def results_used_elsewhere(x, ids, weights, gate_up, down):
    flat = ids.reshape(-1)
    both = torch.bmm(gate_up[flat], x.repeat_interleave(2, dim=0).unsqueeze(-1)).squeeze(-1)
    gate, up = both.chunk(2, dim=-1)
    out = torch.bmm(down[flat], (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1).unsqueeze(-1)).view(x.shape[0], 2, x.shape[1]).sum(1), out


def weights_written_between(x, ids, weights, gate_up, down):
    flat = ids.reshape(-1)
    both = torch.bmm(gate_up[flat], x.repeat_interleave(2, dim=0).unsqueeze(-1)).squeeze(-1)
    down.add_(1)
    gate, up = both.chunk(2, dim=-1)
    out = torch.bmm(down[flat], (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1).unsqueeze(-1)).view(x.shape[0], 2, x.shape[1]).sum(1)


@pytest.mark.parametrize(
    "code", [other_activation, other_ids_for_down, up_first, results_used_elsewhere, weights_written_between]
)
def test_no_experts(code):
    assert fired(code, *operands(), steps=STEPS) == {}
