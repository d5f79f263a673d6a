"""RMSNorm in every spelling of the installed transformers is found, and nothing that only looks like it."""

import importlib
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from dlinfer.graph.ir.dialect import is_view
from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.fusion.rms_norm import RMS_NORM
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS
from tests.graph.passes.fusion.capturing import captured, fused_text

HIDDEN = 64

# One float32 sum of 64 squares may be taken in another order; the scale then differs in its last bits.
FP32: dict[str, Any] = {"rtol": 2e-6, "atol": 2e-6}
# The op rounds where the model does, so results differ only where the scale's last bit turns a rounding:
# one step of bfloat16, which is at most 2^-7 of the value.
BF16: dict[str, Any] = {"rtol": 2**-7, "atol": 2**-14}


def spelled(x, weight, eps=1e-6):
    """The spelling that the golden shows; the tests below change one thing in it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    torch._dynamo.mark_static(x, 2)
    torch._dynamo.mark_static(weight)
    return x, weight


def test_golden_llama():
    def llama(x, weight):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * normed.to(x.dtype)

    assert_expected_inline(
        fused_text(captured(llama, *inputs(torch.bfloat16)), RMS_NORM),
        """\
l_x_: bf16[s0, s1, 64]
l_weight_: bf16[64]
to = aten.to.dtype(l_x_, float32) -> f32[s0, s1, 64]
pow_1 = aten.pow.Tensor_Scalar(to, 2) -> f32[s0, s1, 64]
mean = aten.mean.dim(pow_1, [-1], True) -> f32[s0, s1, 1]
add = aten.add.Tensor(mean, 1e-06) -> f32[s0, s1, 1]
rsqrt = aten.rsqrt(add) -> f32[s0, s1, 1]
mul = aten.mul.Tensor(to, rsqrt) -> f32[s0, s1, 64]
to_1 = aten.to.dtype(mul, bfloat16) -> bf16[s0, s1, 64]
mul_1 = aten.mul.Tensor(l_weight_, to_1) -> bf16[s0, s1, 64]
return [mul_1]
--->
l_x_: bf16[s0, s1, 64]
l_weight_: bf16[64]
rms_norm_default = dlinfer.rms_norm(l_x_, l_weight_, 1e-06) -> bf16[s0, s1, 64]
return [rms_norm_default]
""",
    )


def test_golden_gemma():
    def gemma(x, weight):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * (1.0 + weight.float())).type_as(x)

    assert_expected_inline(
        fused_text(captured(gemma, *inputs(torch.bfloat16)), RMS_NORM),
        """\
l_x_: bf16[s0, s1, 64]
l_weight_: bf16[64]
to = aten.to.dtype(l_x_, float32) -> f32[s0, s1, 64]
pow_1 = aten.pow.Tensor_Scalar(to, 2) -> f32[s0, s1, 64]
mean = aten.mean.dim(pow_1, [-1], True) -> f32[s0, s1, 1]
add = aten.add.Tensor(mean, 1e-06) -> f32[s0, s1, 1]
rsqrt = aten.rsqrt(add) -> f32[s0, s1, 1]
mul = aten.mul.Tensor(to, rsqrt) -> f32[s0, s1, 64]
to_1 = aten.to.dtype(l_weight_, float32) -> f32[64]
add_1 = aten.add.Tensor(to_1, 1.0) -> f32[64]
mul_1 = aten.mul.Tensor(mul, add_1) -> f32[s0, s1, 64]
type_as = aten.type_as(mul_1, l_x_) -> bf16[s0, s1, 64]
return [type_as]
--->
l_x_: bf16[s0, s1, 64]
l_weight_: bf16[64]
to = aten.to.dtype(l_x_, float32) -> f32[s0, s1, 64]
to_1 = aten.to.dtype(l_weight_, float32) -> f32[64]
add_1 = aten.add.Tensor(to_1, 1.0) -> f32[64]
rms_norm_default = dlinfer.rms_norm(to, add_1, 1e-06) -> f32[s0, s1, 64]
type_as = aten.type_as(rms_norm_default, l_x_) -> bf16[s0, s1, 64]
return [type_as]
""",
    )


def test_golden_heads_before_tokens():
    def norm_of_heads(x, weight):
        return spelled(x.view(*x.shape[:2], 4, 16).transpose(1, 2), weight[:16])

    assert_expected_inline(
        fused_text(captured(norm_of_heads, *inputs()), RMS_NORM),
        """\
l_x_: f32[s0, s1, 64]
l_weight_: f32[64]
g_spelled_defaults_0_: f64[]
view = aten.view(l_x_, [s0, s1, 4, 16]) -> f32[s0, s1, 4, 16]
transpose = aten.transpose.int(view, 1, 2) -> f32[s0, 4, s1, 16]
slice_1 = aten.slice.Tensor(l_weight_, 0, 0, 16) -> f32[16]
to = aten.to.dtype(transpose, float32) -> f32[s0, 4, s1, 16]
pow_1 = aten.pow.Tensor_Scalar(to, 2) -> f32[s0, 4, s1, 16]
mean = aten.mean.dim(pow_1, [-1], True) -> f32[s0, 4, s1, 1]
add = aten.add.Tensor(mean, 1e-06) -> f32[s0, 4, s1, 1]
rsqrt = aten.rsqrt(add) -> f32[s0, 4, s1, 1]
mul = aten.mul.Tensor(to, rsqrt) -> f32[s0, 4, s1, 16]
to_1 = aten.to.dtype(mul, float32) -> f32[s0, 4, s1, 16]
mul_1 = aten.mul.Tensor(slice_1, to_1) -> f32[s0, 4, s1, 16]
return [mul_1]
--->
l_x_: f32[s0, s1, 64]
l_weight_: f32[64]
g_spelled_defaults_0_: f64[]
view = aten.view(l_x_, [s0, s1, 4, 16]) -> f32[s0, s1, 4, 16]
transpose = aten.transpose.int(view, 1, 2) -> f32[s0, 4, s1, 16]
slice_1 = aten.slice.Tensor(l_weight_, 0, 0, 16) -> f32[16]
rms_norm_default = dlinfer.rms_norm(view, slice_1, 1e-06) -> f32[s0, s1, 4, 16]
transpose_int = aten.transpose.int(rms_norm_default, 1, 2) -> f32[s0, 4, s1, 16]
return [transpose_int]
""",
    )


# --- what must fire

CLASSES = [
    ("aimv2", "Aimv2RMSNorm"),
    ("deepseek_v4", "DeepseekV4UnweightedRMSNorm"),
    ("gemma", "GemmaRMSNorm"),
    ("gemma3", "Gemma3RMSNorm"),
    ("gemma3n", "Gemma3nRMSNorm"),
    ("gpt_oss", "GptOssRMSNorm"),
    ("helium", "HeliumRMSNorm"),
    ("llama", "LlamaRMSNorm"),
    ("llama4", "Llama4TextL2Norm"),
    ("llama4", "Llama4TextRMSNorm"),
    ("mamba2", "Mamba2RMSNorm"),
    ("mixtral", "MixtralRMSNorm"),
    ("moshi", "MoshiRMSNorm"),
    ("nanochat", "NanoChatRMSNorm"),
    ("nemotron_h", "NemotronHRMSNorm"),
    ("olmo2", "Olmo2RMSNorm"),
    ("qwen3", "Qwen3RMSNorm"),
    ("t5", "T5LayerNorm"),
]


def build(family, name, dtype):
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    weightless = name in ("Llama4TextL2Norm", "DeepseekV4UnweightedRMSNorm", "NanoChatRMSNorm")
    norm = kind() if weightless else kind(HIDDEN)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "cleaned"),
    # In float32 the model's casts change nothing: as captured they are there, after the clean-up they are not.
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["fp32 as captured", "fp32 cleaned up", "bf16"],
)
@pytest.mark.parametrize(("family", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_transformers_class(family, name, dtype, cleaned):
    one = captured(build(family, name, dtype), inputs(dtype)[0])
    if cleaned:
        REMOVE_NOOPS.run(one.graph_module)
        CSE.run(one.graph_module)
        DCE.run(one.graph_module)
    want, strides = one.run(), one.strides()
    assert one.fuse(RMS_NORM) == 1
    assert one.count("dlinfer.rms_norm") == 1
    assert one.count("aten.mean.dim") == one.count("aten.mul.Tensor") == 0
    torch.testing.assert_close(one.run(), want, **(FP32 if dtype is torch.float32 else BF16))
    assert one.strides() == strides


SPELLINGS = {
    "x * x": lambda x, w: w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)),
    "torch.square, torch.mean": lambda x, w: (
        w * (x * torch.rsqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + 1e-6))
    ),
    "x / sqrt": lambda x, w: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "1 / sqrt": lambda x, w: x * (1.0 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w,
    "** -0.5": lambda x, w: x * (x**2).mean(-1, keepdim=True).add(1e-6) ** -0.5 * w,
    "eps first": lambda x, w: x * torch.rsqrt(1e-6 + x.pow(2).mean(2, keepdim=True)) * w,
    "functional": lambda x, w: nn.functional.rms_norm(x, (HIDDEN,), w, 1e-6),
    "functional, default eps": lambda x, w: nn.functional.rms_norm(x, (HIDDEN,), w),
    "functional, no weight": lambda x, w: nn.functional.rms_norm(x, (HIDDEN,), eps=1e-6) * w,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling(spelling, dtype):
    x, weight = inputs(dtype)
    one = captured(SPELLINGS[spelling], x, weight)
    unfused = one.run()[0]
    assert one.fuse(RMS_NORM) == 1
    fused, exact = one.run()[0], SPELLINGS[spelling](x.double(), weight.double())
    if dtype is torch.float32:
        torch.testing.assert_close(fused, unfused, **FP32)
    # Where a spelling computes the statistic in 16 bits the op is closer to the truth, never farther from it
    # than by a last bit of its own.
    assert (fused - exact).abs().max() <= (unfused - exact).abs().max() * 1.01 + 1e-6


def test_a_float32_weight_on_a_16_bit_model_stays_outside():
    """The product is float32 there, which the op cannot give: it stops at the cast before it."""

    def of_fixed_eps(x, weight):
        return spelled(x, weight)

    x, weight = inputs(torch.bfloat16)
    one = captured(of_fixed_eps, x, weight.float())
    want = one.run()
    assert one.fuse(RMS_NORM) == 1
    assert one.count("dlinfer.rms_norm") == one.count("aten.mul.Tensor") == 1
    torch.testing.assert_close(one.run(), want, **BF16)


def test_two_weights_share_one_norm():
    def parallel(x, weight):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed * weight, normed * weight.sin()

    one = captured(parallel, *inputs())
    want = one.run()
    assert one.fuse(RMS_NORM) == 1
    assert one.count("aten.mul.Tensor") == 2
    torch.testing.assert_close(one.run(), want, **FP32)


def test_views_of_the_result_are_still_seen_as_views():
    one = captured(lambda x, w: spelled(x, w).view(-1, 4).sin(), *inputs())
    assert one.fuse(RMS_NORM) == 1
    view = next(
        iter(one.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default))
    )
    assert is_view(view)


# --- what must not


def used_elsewhere(x, weight):
    mean = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(mean + 1e-6)), mean


def written_in_between(x, weight):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.mul_(2)
    return weight * (x * scale)


def view_written_later(x, weight):
    normed = spelled(x, weight)
    normed.view(-1).mul_(2)
    return normed + 1


REFUSED = {
    "interior used elsewhere": used_elsewhere,
    "memory written in between": written_in_between,
    "a view of the result is written": view_written_later,
    "eps is a tensor": lambda x, w: spelled(x, w, w.sum().abs()),
    "no eps": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "eps is negative": lambda x, w: spelled(x, w, -1e-6),
    "mean over another dimension": lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w,
    "mean over two dimensions": lambda x, w: x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6) * w,
    "sum": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * w,
    "cube": lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6) * w,
    "another x": lambda x, w: x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "root of the mean outside": lambda x, w: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w,
    "layer norm by hand": lambda x, w: (
        (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)
    ),
    "float32 rounded to 16 bits before the square": lambda x, w: (
        x * torch.rsqrt(x.bfloat16().float().pow(2).mean(-1, keepdim=True) + 1e-6)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_match(name):
    one = captured(REFUSED[name], *inputs())
    assert one.fuse(RMS_NORM) == 0


def written_through_a_view(x, weight):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.view(-1).mul_(2)
    return weight * (x * scale)


NEAR_MISSES = [
    (used_elsewhere, ["output, outside the pattern, uses mean"]),
    (written_through_a_view, ["memory that the pattern reads is written between pow_1 and mul_1"]),
    (view_written_later, ["the memory of mul_1 is written"]),
    (REFUSED["no eps"], []),
]


@pytest.mark.parametrize(("code", "reasons"), NEAR_MISSES)
def test_a_near_miss_says_why(code, reasons):
    one = captured(code, *inputs())
    assert one.fuse(RMS_NORM) == 0
    assert [match.reason for match in one.refused] == reasons
    assert all(f"{__file__}:" in match.line for match in one.refused)


def test_a_weight_that_is_no_vector_stays_outside():
    one = captured(
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[None, :5, None], *inputs()
    )
    want = one.run()
    assert one.fuse(RMS_NORM) == 1
    assert one.count("aten.mul.Tensor") == 1
    torch.testing.assert_close(one.run(), want, **FP32)
