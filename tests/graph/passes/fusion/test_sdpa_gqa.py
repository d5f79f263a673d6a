"""Attention written out, repeated keys and values, and one token's queries."""

from itertools import product
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional
from transformers import BertConfig, GemmaConfig, LlamaConfig
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.gemma.modeling_gemma import GemmaAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from dlinfer.graph.passes.fusion.sdpa_gqa import (
    GROUPED_ATTENTION,
    ONE_TOKEN_ATTENTION,
    WRITTEN_OUT_ATTENTION,
)
from tests.graph.passes.fusion.fusing import changes, clean, filled, fired, golden, tiny

RULES = (WRITTEN_OUT_ATTENTION, GROUPED_ATTENTION, ONE_TOKEN_ATTENTION)

# float32: the op sums in blocks and another order. bfloat16: written out, scores and probabilities are rounded
# to 8 bits on the way, the op keeps them in float32; both round the result.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def tensors(tokens: int = 5, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """q of 4 heads, k and v of 2, and an additive mask, with heads and head size known when compiled."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, tokens, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.zeros(2, 1, tokens, 5)
    mask[0, ..., 3:] = torch.finfo(dtype).min
    given = tuple(one.to(dtype) for one in (q, k, v, mask))
    for one, dim in product(given, (1, 3)):
        if one is not given[3]:
            torch._dynamo.mark_static(one, dim)
    return given


def repeat(x, times=2):
    batch, heads, tokens, size = x.shape
    return x[:, :, None].expand(batch, heads, times, tokens, size).reshape(batch, heads * times, tokens, size)


def written_out(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask
    probabilities = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(probabilities, v).transpose(1, 2).contiguous()


def grouped(q, k, v, mask):
    return functional.scaled_dot_product_attention(q, repeat(k), repeat(v), mask)


def one_head_each(code):
    """The code on as many heads of keys and values as of queries."""
    return lambda q, k, v, mask: code(q, q * 2, q * 3, mask)


# --- goldens


def test_written_out():
    assert_expected_inline(
        golden(clean(one_head_each(written_out), *tensors()), WRITTEN_OUT_ATTENTION),
        """\
l_q_: f32[s0, 4, s1, 8]
l_mask_: f32[s0, 1, s1, s1]
mul = aten.mul.Tensor(l_q_, 2) -> f32[s0, 4, s1, 8]
mul_1 = aten.mul.Tensor(l_q_, 3) -> f32[s0, 4, s1, 8]
transpose = aten.transpose.int(mul, 2, 3) -> f32[s0, 4, 8, s1]
matmul = aten.matmul(l_q_, transpose) -> f32[s0, 4, s1, s1]
mul_2 = aten.mul.Tensor(matmul, 0.25) -> f32[s0, 4, s1, s1]
add = aten.add.Tensor(mul_2, l_mask_) -> f32[s0, 4, s1, s1]
softmax = aten.softmax.int(add, -1, float32) -> f32[s0, 4, s1, s1]
matmul_1 = aten.matmul(softmax, mul_1) -> f32[s0, 4, s1, 8]
transpose_1 = aten.transpose.int(matmul_1, 1, 2) -> f32[s0, s1, 4, 8]
contiguous = aten.contiguous(transpose_1) -> f32[s0, s1, 4, 8]
return [contiguous]
--->
l_q_: f32[s0, 4, s1, 8]
l_mask_: f32[s0, 1, s1, s1]
mul = aten.mul.Tensor(l_q_, 2) -> f32[s0, 4, s1, 8]
mul_1 = aten.mul.Tensor(l_q_, 3) -> f32[s0, 4, s1, 8]
eq_scalar = aten.eq.Scalar(l_mask_, -inf) -> bool[s0, 1, s1, s1]
all_dim = aten.all.dim(eq_scalar, -1, True) -> bool[s0, 1, s1, 1]
masked_fill_scalar = aten.masked_fill.Scalar(l_mask_, all_dim, nan) -> f32[s0, 1, s1, s1]
scaled_dot_product_attention_default = aten.scaled_dot_product_attention(l_q_, mul, mul_1, masked_fill_scalar,
    scale=0.25) -> f32[s0, 4, s1, 8]
transpose_int = aten.transpose.int(scaled_dot_product_attention_default, 1, 2) -> f32[s0, s1, 4, 8]
contiguous = aten.contiguous(transpose_int) -> f32[s0, s1, 4, 8]
return [contiguous]
""",
    )


def test_grouped():
    assert_expected_inline(
        golden(clean(grouped, *tensors()), GROUPED_ATTENTION),
        """\
l_k_: f32[s0, 2, s1, 8]
l_v_: f32[s0, 2, s1, 8]
l_q_: f32[s0, 4, s1, 8]
l_mask_: f32[s0, 1, s1, s1]
unsqueeze = aten.unsqueeze(l_k_, 2) -> f32[s0, 2, 1, s1, 8]
expand = aten.expand(unsqueeze, [s0, 2, 2, s1, 8]) -> f32[s0, 2, 2, s1, 8]
reshape = aten.reshape(expand, [s0, 4, s1, 8]) -> f32[s0, 4, s1, 8]
unsqueeze_1 = aten.unsqueeze(l_v_, 2) -> f32[s0, 2, 1, s1, 8]
expand_1 = aten.expand(unsqueeze_1, [s0, 2, 2, s1, 8]) -> f32[s0, 2, 2, s1, 8]
reshape_1 = aten.reshape(expand_1, [s0, 4, s1, 8]) -> f32[s0, 4, s1, 8]
scaled_dot_product_attention = aten.scaled_dot_product_attention(l_q_, reshape, reshape_1, l_mask_) -> f32[s0,
    4, s1, 8]
return [scaled_dot_product_attention]
--->
l_k_: f32[s0, 2, s1, 8]
l_v_: f32[s0, 2, s1, 8]
l_q_: f32[s0, 4, s1, 8]
l_mask_: f32[s0, 1, s1, s1]
scaled_dot_product_attention_default = aten.scaled_dot_product_attention(l_q_, l_k_, l_v_, l_mask_, 0.0,
    False, scale=None, enable_gqa=True) -> f32[s0, 4, s1, 8]
return [scaled_dot_product_attention_default]
""",
    )


def test_one_token():
    given = tensors(tokens=1)
    assert_expected_inline(
        golden(clean(grouped, *given), GROUPED_ATTENTION, ONE_TOKEN_ATTENTION),
        """\
l_k_: f32[s0, 2, s1, 8]
l_v_: f32[s0, 2, s1, 8]
l_q_: f32[s0, 4, 1, 8]
l_mask_: f32[s0, 1, 1, s1]
unsqueeze = aten.unsqueeze(l_k_, 2) -> f32[s0, 2, 1, s1, 8]
expand = aten.expand(unsqueeze, [s0, 2, 2, s1, 8]) -> f32[s0, 2, 2, s1, 8]
reshape = aten.reshape(expand, [s0, 4, s1, 8]) -> f32[s0, 4, s1, 8]
unsqueeze_1 = aten.unsqueeze(l_v_, 2) -> f32[s0, 2, 1, s1, 8]
expand_1 = aten.expand(unsqueeze_1, [s0, 2, 2, s1, 8]) -> f32[s0, 2, 2, s1, 8]
reshape_1 = aten.reshape(expand_1, [s0, 4, s1, 8]) -> f32[s0, 4, s1, 8]
scaled_dot_product_attention = aten.scaled_dot_product_attention(l_q_, reshape, reshape_1, l_mask_) -> f32[s0,
    4, 1, 8]
return [scaled_dot_product_attention]
--->
l_k_: f32[s0, 2, s1, 8]
l_v_: f32[s0, 2, s1, 8]
l_q_: f32[s0, 4, 1, 8]
l_mask_: f32[s0, 1, 1, s1]
reshape_default = aten.reshape(l_q_, [-1, 2, 2, 8]) -> f32[s0, 2, 2, 8]
scaled_dot_product_attention_default_1 = aten.scaled_dot_product_attention(reshape_default, l_k_, l_v_,
    l_mask_, scale=None) -> f32[s0, 2, 2, 8]
reshape_default_1 = aten.reshape(scaled_dot_product_attention_default_1, [-1, 4, 1, 8]) -> f32[s0, 4, 1, 8]
return [reshape_default_1]
""",
    )


# --- attention written out


def no_mask(q, k, v, mask):
    return (torch.softmax(q @ k.mT / 2, -1) @ v).transpose(1, 2).reshape(q.shape[0], q.shape[2], 32)


def no_scale(q, k, v, mask):
    return (
        torch.matmul((mask + torch.matmul(q, k.permute(0, 1, 3, 2))).softmax(-1), v)
        .transpose(1, 2)
        .contiguous()
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("code", [written_out, no_mask, no_scale])
def test_spellings(code, dtype):
    count, got, want = changes(clean(one_head_each(code), *tensors(dtype=dtype)), *RULES)
    assert count == {"written_out_attention": 1}
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


def softcap(q, k, v, mask):
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.25) + mask
    return torch.matmul(functional.softmax(scores, dim=-1), v).transpose(1, 2).contiguous()


def probabilities_used_elsewhere(q, k, v, mask):
    probabilities = functional.softmax(torch.matmul(q, k.transpose(2, 3)) + mask, dim=-1)
    return torch.matmul(probabilities, v).transpose(1, 2).contiguous(), probabilities


def softmax_over_queries(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) + mask
    return torch.matmul(functional.softmax(scores, dim=-2), v).transpose(1, 2).contiguous()


def narrow_softmax(q, k, v, mask):
    scores = (torch.matmul(q, k.transpose(2, 3)) + mask).half()
    return torch.matmul(functional.softmax(scores, dim=-1).to(q.dtype), v).transpose(1, 2).contiguous()


def scaled_mask(q, k, v, mask):
    scores = torch.add(torch.matmul(q, k.transpose(2, 3)), mask, alpha=2)
    return torch.matmul(functional.softmax(scores, dim=-1), v).transpose(1, 2).contiguous()


def keys_written_between(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) + mask
    k.add_(1)
    return torch.matmul(functional.softmax(scores, dim=-1), v).transpose(1, 2).contiguous()


def result_seen_by_head(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) + mask
    return torch.matmul(functional.softmax(scores, dim=-1), v).view(q.shape[0] * 4, q.shape[2], 8)


def no_transpose(q, k, v, mask):
    scores = torch.matmul(q, k) + mask[..., :1]
    return torch.matmul(functional.softmax(scores, dim=-1), v).transpose(1, 2).contiguous()


def mask_that_enlarges(q, k, v, mask):
    scores = torch.matmul(q[:1], k[:1].transpose(2, 3)) + mask
    return torch.matmul(functional.softmax(scores, dim=-1), v).transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    "code",
    [
        softcap,
        probabilities_used_elsewhere,
        softmax_over_queries,
        narrow_softmax,
        scaled_mask,
        keys_written_between,
        result_seen_by_head,
        mask_that_enlarges,
    ],
)
def test_no_match_of_attention_written_out(code):
    assert fired(one_head_each(code), *tensors(), steps=RULES) == {}


def test_a_product_with_keys_that_are_not_transposed():
    square = [torch.randn(2, 4, 8, 8) for _ in range(3)]
    assert fired(no_transpose, *square, torch.zeros(2, 1, 8, 8), steps=RULES) == {}


# --- repeated keys and values


def interleaved(q, k, v, mask):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return functional.scaled_dot_product_attention(q, k, v, mask)


def contiguous(q, k, v, mask):
    return functional.scaled_dot_product_attention(q, repeat(k).contiguous(), repeat(v).contiguous(), mask)


def causal(q, k, v, mask):
    return functional.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True, scale=0.5)


def repeated_keys_seen_elsewhere(q, k, v, mask):
    many = repeat(k)
    return functional.scaled_dot_product_attention(q, many, repeat(v), mask), many


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("code", [grouped, interleaved, contiguous, causal, repeated_keys_seen_elsewhere])
def test_repeated_heads(code, dtype):
    one = clean(code, *tensors(dtype=dtype))
    count, got, want = changes(one, *RULES)
    assert count == {"grouped_attention": 1}
    torch.testing.assert_close(got, want, rtol=0, atol=0)  # torch's CPU kernel does the same sums either way


def other_order(q, k, v, mask):
    """Heads 0, 1, 0, 1 instead of 0, 0, 1, 1."""
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return functional.scaled_dot_product_attention(q, k, v, mask)


def other_order_by_expand(q, k, v, mask):
    k, v = (x[:, None].expand(-1, 2, -1, -1, -1).reshape(q.shape[0], 4, k.shape[2], 8) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, mask)


def only_keys(q, k, v, mask):
    return functional.scaled_dot_product_attention(q, repeat(k), torch.cat((v, v), 1), mask)


def keys_written_after_repeating(q, k, v, mask):
    many = repeat(k)
    k.add_(1)
    return functional.scaled_dot_product_attention(q, many, repeat(v), mask)


@pytest.mark.parametrize(
    "code", [other_order, other_order_by_expand, only_keys, keys_written_after_repeating]
)
def test_no_match_of_repeated_heads(code):
    assert fired(code, *tensors(), steps=RULES) == {}


def test_the_fast_kernel_serves_groups():
    q, k, v, mask = tensors()
    for given in (mask, mask.bool(), None):
        with torch.profiler.profile() as profile:
            functional.scaled_dot_product_attention(q, k, v, given, enable_gqa=True)
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {
            event.key for event in profile.key_averages()
        }


# --- one token


def per_head_mask(q, k, v, mask):
    mask = mask.expand(-1, 4, -1, -1) * torch.arange(4.0)[:, None, None]
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def groups(q, k, v, mask):
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def groups_without_mask(q, k, v, mask):
    return functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)


def groups_causal(q, k, v, mask):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("code", [groups, groups_without_mask])
def test_queries_of_one_token(code, dtype):
    count, got, want = changes(clean(code, *tensors(1, dtype)), *RULES)
    assert count == {"one_token_attention": 1}
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


@pytest.mark.parametrize(("code", "tokens"), [(groups, 5), (per_head_mask, 1), (groups_causal, 1)])
def test_no_match_of_one_token(code, tokens):
    assert fired(code, *tensors(tokens), steps=RULES) == {}


# --- transformers


def attend(module: nn.Module):
    return lambda x, cos, mask: module(x, (cos, cos), mask)[0]


@pytest.mark.parametrize(
    "dtype",
    [one if one is torch.float32 else pytest.param(one, marks=pytest.mark.full) for one in TOLERANCES],
)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("attention", "config"),
    [
        (LlamaAttention, LlamaConfig),
        pytest.param(GemmaAttention, GemmaConfig, marks=pytest.mark.full),
    ],
)
def test_transformers(attention, config, implementation, tokens, dtype):
    module = filled(attention(tiny(config, attn_implementation=implementation), 0), dtype)
    x, cos = torch.randn(2, tokens, 32, dtype=dtype), torch.randn(2, tokens, 8, dtype=dtype)
    count, got, want = changes(clean(attend(module), x, cos, tensors(tokens, dtype)[3][..., :tokens]), *RULES)
    expected = {"grouped_attention": 1}
    if implementation == "eager":
        expected["written_out_attention"] = 1
    if tokens == 1:
        expected["one_token_attention"] = 1
    assert count == expected
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


def test_transformers_attention_that_returns_its_weights_stays():
    module = filled(LlamaAttention(tiny(LlamaConfig, attn_implementation="eager"), 0))
    count = fired(
        lambda x, cos: module(x, (cos, cos), None), torch.randn(2, 5, 32), torch.randn(2, 5, 8), steps=RULES
    )
    assert count == {}


def test_transformers_bert():
    module = filled(BertSelfAttention(tiny(BertConfig, attn_implementation="eager")))
    count, got, want = changes(clean(lambda x: module(x, None)[0], torch.randn(2, 5, 32)), *RULES)
    assert count == {"written_out_attention": 1}
    torch.testing.assert_close(got, want, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_no_key_gets_nan_as_the_written_form_gives_it(tokens, dtype):
    """And one that sees a single key, or only lowest numbers, does not."""
    q, k, v, mask = tensors(tokens, dtype)
    mask = mask.expand(2, 1, tokens, 5).clone()
    mask[0, 0, 0] = -torch.inf
    mask[1, 0, -1, 1:] = -torch.inf
    one = clean(written_out, q, repeat(k), repeat(v), mask)
    count, got, want = changes(one, WRITTEN_OUT_ATTENTION)
    assert count == {"written_out_attention": 1}
    assert torch.equal(got[0].isnan(), want[0].isnan())
    assert got[0][0, 0].isnan().all() and not got[0][1].isnan().any()
    torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCES[dtype])
