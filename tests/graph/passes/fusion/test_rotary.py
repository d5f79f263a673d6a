"""Rotary embedding of query and key, as the installed transformers write it, becomes one op."""

import pytest
import torch
from expecttest import assert_expected_inline

from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.fusion.rotary import ROTARY
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS
from tests.graph.passes.fusion.capturing import captured, fused_text
from tests.graph.passes.fusion.rotating import SIZE, Heads, fuses_to_equal_bits, inputs, rotation

llama = rotation("llama")


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


def test_golden_llama():
    graph = captured(Heads(llama), *inputs(torch.bfloat16))
    assert_expected_inline(
        fused_text(graph, ROTARY),
        """\
l_q_: bf16[s0, s1, 64]
l_k_: bf16[s0, s1, 32]
l_cos_: bf16[s0, s1, 16]
l_sin_: bf16[s0, s1, 16]
view = aten.view(l_q_, [s0, s1, -1, 16]) -> bf16[s0, s1, 4, 16]
view_1 = aten.view(l_k_, [s0, s1, -1, 16]) -> bf16[s0, s1, 2, 16]
transpose = aten.transpose.int(view, 1, 2) -> bf16[s0, 4, s1, 16]
transpose_1 = aten.transpose.int(view_1, 1, 2) -> bf16[s0, 2, s1, 16]
unsqueeze = aten.unsqueeze(l_cos_, 1) -> bf16[s0, 1, s1, 16]
unsqueeze_1 = aten.unsqueeze(l_sin_, 1) -> bf16[s0, 1, s1, 16]
mul = aten.mul.Tensor(transpose, unsqueeze) -> bf16[s0, 4, s1, 16]
slice_1 = aten.slice.Tensor(transpose, 3, 0, 8) -> bf16[s0, 4, s1, 8]
slice_2 = aten.slice.Tensor(transpose, 3, 8, end) -> bf16[s0, 4, s1, 8]
neg = aten.neg(slice_2) -> bf16[s0, 4, s1, 8]
cat = aten.cat([neg, slice_1], -1) -> bf16[s0, 4, s1, 16]
mul_1 = aten.mul.Tensor(cat, unsqueeze_1) -> bf16[s0, 4, s1, 16]
add = aten.add.Tensor(mul, mul_1) -> bf16[s0, 4, s1, 16]
mul_2 = aten.mul.Tensor(transpose_1, unsqueeze) -> bf16[s0, 2, s1, 16]
slice_3 = aten.slice.Tensor(transpose_1, 3, 0, 8) -> bf16[s0, 2, s1, 8]
slice_4 = aten.slice.Tensor(transpose_1, 3, 8, end) -> bf16[s0, 2, s1, 8]
neg_1 = aten.neg(slice_4) -> bf16[s0, 2, s1, 8]
cat_1 = aten.cat([neg_1, slice_3], -1) -> bf16[s0, 2, s1, 16]
mul_3 = aten.mul.Tensor(cat_1, unsqueeze_1) -> bf16[s0, 2, s1, 16]
add_1 = aten.add.Tensor(mul_2, mul_3) -> bf16[s0, 2, s1, 16]
return [add, add_1]
--->
l_q_: bf16[s0, s1, 64]
l_k_: bf16[s0, s1, 32]
l_cos_: bf16[s0, s1, 16]
l_sin_: bf16[s0, s1, 16]
view = aten.view(l_q_, [s0, s1, -1, 16]) -> bf16[s0, s1, 4, 16]
view_1 = aten.view(l_k_, [s0, s1, -1, 16]) -> bf16[s0, s1, 2, 16]
transpose = aten.transpose.int(view, 1, 2) -> bf16[s0, 4, s1, 16]
transpose_1 = aten.transpose.int(view_1, 1, 2) -> bf16[s0, 2, s1, 16]
apply_rotary_pos_emb_default = dlinfer.apply_rotary_pos_emb(view, view_1, l_cos_, l_sin_) -> (bf16[s0, s1, 4,
    16], bf16[s0, s1, 2, 16])
getitem = operator.getitem(apply_rotary_pos_emb_default, 0) -> bf16[s0, s1, 4, 16]
getitem_1 = operator.getitem(apply_rotary_pos_emb_default, 1) -> bf16[s0, s1, 2, 16]
transpose_int = aten.transpose.int(getitem, 1, 2) -> bf16[s0, 4, s1, 16]
transpose_int_1 = aten.transpose.int(getitem_1, 1, 2) -> bf16[s0, 2, s1, 16]
return [transpose_int, transpose_int_1]
""",
    )


def test_golden_one_table_for_the_batch_and_part_of_the_head():
    graph = captured(Heads(rotation("gpt_neox")), *inputs(batch=1, rotated=8))
    assert_expected_inline(
        fused_text(graph, ROTARY),
        """\
l_q_: f32[s0, s1, 64]
l_k_: f32[s0, s1, 32]
l_cos_: f32[1, s1, 8]
l_sin_: f32[1, s1, 8]
view = aten.view(l_q_, [s0, s1, -1, 16]) -> f32[s0, s1, 4, 16]
view_1 = aten.view(l_k_, [s0, s1, -1, 16]) -> f32[s0, s1, 2, 16]
transpose = aten.transpose.int(view, 1, 2) -> f32[s0, 4, s1, 16]
transpose_1 = aten.transpose.int(view_1, 1, 2) -> f32[s0, 2, s1, 16]
unsqueeze = aten.unsqueeze(l_cos_, 1) -> f32[1, 1, s1, 8]
unsqueeze_1 = aten.unsqueeze(l_sin_, 1) -> f32[1, 1, s1, 8]
slice_1 = aten.slice.Tensor(transpose, 3, 0, 8) -> f32[s0, 4, s1, 8]
slice_2 = aten.slice.Tensor(transpose, 3, 8, end) -> f32[s0, 4, s1, 8]
slice_3 = aten.slice.Tensor(transpose_1, 3, 0, 8) -> f32[s0, 2, s1, 8]
slice_4 = aten.slice.Tensor(transpose_1, 3, 8, end) -> f32[s0, 2, s1, 8]
mul = aten.mul.Tensor(slice_1, unsqueeze) -> f32[s0, 4, s1, 8]
slice_5 = aten.slice.Tensor(slice_1, 3, 0, 4) -> f32[s0, 4, s1, 4]
slice_6 = aten.slice.Tensor(slice_1, 3, 4, end) -> f32[s0, 4, s1, 4]
neg = aten.neg(slice_6) -> f32[s0, 4, s1, 4]
cat = aten.cat([neg, slice_5], -1) -> f32[s0, 4, s1, 8]
mul_1 = aten.mul.Tensor(cat, unsqueeze_1) -> f32[s0, 4, s1, 8]
add = aten.add.Tensor(mul, mul_1) -> f32[s0, 4, s1, 8]
mul_2 = aten.mul.Tensor(slice_3, unsqueeze) -> f32[s0, 2, s1, 8]
slice_7 = aten.slice.Tensor(slice_3, 3, 0, 4) -> f32[s0, 2, s1, 4]
slice_8 = aten.slice.Tensor(slice_3, 3, 4, end) -> f32[s0, 2, s1, 4]
neg_1 = aten.neg(slice_8) -> f32[s0, 2, s1, 4]
cat_1 = aten.cat([neg_1, slice_7], -1) -> f32[s0, 2, s1, 8]
mul_3 = aten.mul.Tensor(cat_1, unsqueeze_1) -> f32[s0, 2, s1, 8]
add_1 = aten.add.Tensor(mul_2, mul_3) -> f32[s0, 2, s1, 8]
cat_2 = aten.cat([add, slice_2], -1) -> f32[s0, 4, s1, 16]
cat_3 = aten.cat([add_1, slice_4], -1) -> f32[s0, 2, s1, 16]
return [cat_2, cat_3]
--->
l_q_: f32[s0, s1, 64]
l_k_: f32[s0, s1, 32]
l_cos_: f32[1, s1, 8]
l_sin_: f32[1, s1, 8]
view = aten.view(l_q_, [s0, s1, -1, 16]) -> f32[s0, s1, 4, 16]
view_1 = aten.view(l_k_, [s0, s1, -1, 16]) -> f32[s0, s1, 2, 16]
transpose = aten.transpose.int(view, 1, 2) -> f32[s0, 4, s1, 16]
transpose_1 = aten.transpose.int(view_1, 1, 2) -> f32[s0, 2, s1, 16]
slice_1 = aten.slice.Tensor(transpose, 3, 0, 8) -> f32[s0, 4, s1, 8]
slice_2 = aten.slice.Tensor(transpose, 3, 8, end) -> f32[s0, 4, s1, 8]
slice_3 = aten.slice.Tensor(transpose_1, 3, 0, 8) -> f32[s0, 2, s1, 8]
slice_4 = aten.slice.Tensor(transpose_1, 3, 8, end) -> f32[s0, 2, s1, 8]
transpose_int = aten.transpose.int(slice_1, 1, 2) -> f32[s0, s1, 4, 8]
transpose_int_1 = aten.transpose.int(slice_3, 1, 2) -> f32[s0, s1, 2, 8]
sym_size_int = aten.sym_size.int(transpose_int, 0) -> s0
expand_default = aten.expand(l_cos_, [sym_size_int, -1, -1]) -> f32[s0, s1, 8]
sym_size_int_1 = aten.sym_size.int(transpose_int, 0) -> s0
expand_default_1 = aten.expand(l_sin_, [sym_size_int_1, -1, -1]) -> f32[s0, s1, 8]
apply_rotary_pos_emb_default = dlinfer.apply_rotary_pos_emb(transpose_int, transpose_int_1, expand_default,
    expand_default_1) -> (f32[s0, s1, 4, 8], f32[s0, s1, 2, 8])
getitem = operator.getitem(apply_rotary_pos_emb_default, 0) -> f32[s0, s1, 4, 8]
getitem_1 = operator.getitem(apply_rotary_pos_emb_default, 1) -> f32[s0, s1, 2, 8]
transpose_int_2 = aten.transpose.int(getitem, 1, 2) -> f32[s0, 4, s1, 8]
transpose_int_3 = aten.transpose.int(getitem_1, 1, 2) -> f32[s0, 2, s1, 8]
cat_2 = aten.cat([transpose_int_2, slice_2], -1) -> f32[s0, 4, s1, 16]
cat_3 = aten.cat([transpose_int_3, slice_4], -1) -> f32[s0, 2, s1, 16]
return [cat_2, cat_3]
""",
    )


# --- what must fire

FAMILIES = {
    # family: features of a head that it rotates
    "gemma": SIZE,
    "glm4_moe": 8,
    "gpt_neox": 8,
    "llama": SIZE,
    "modernbert": SIZE,
    "nemotron": 8,
    "olmo2": SIZE,
    "phi": SIZE,
    "phi3": 8,
    "qwen3": SIZE,
    "stablelm": SIZE,
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_function(family, dtype):
    """Products and sum are rounded where the model rounds them, so that results are equal bit by bit."""
    one = captured(Heads(rotation(family)), *inputs(dtype, rotated=FAMILIES[family]))
    fuses_to_equal_bits(one, ROTARY)
    assert one.count("dlinfer.apply_rotary_pos_emb") == 1
    assert one.count("aten.neg") == one.count("aten.mul.Tensor") == 0


def test_after_the_clean_up():
    one = captured(Heads(llama), *inputs())
    REMOVE_NOOPS.run(one.graph_module)
    CSE.run(one.graph_module)
    DCE.run(one.graph_module)
    fuses_to_equal_bits(one, ROTARY)


@pytest.mark.parametrize("family", ["olmo2", "modernbert"])
def test_float32_tables_on_a_16_bit_model(family):
    one = captured(Heads(rotation(family)), *inputs(torch.bfloat16, tables=torch.float32))
    fuses_to_equal_bits(one, ROTARY)


def test_tokens_before_heads():
    one = captured(Heads(lambda *given: llama(*given, unsqueeze_dim=2), heads_first=False), *inputs())
    fuses_to_equal_bits(one, ROTARY)
    assert one.count("aten.transpose.int") == 0


def test_vision_without_a_batch():
    """Qwen2-VL's vision tower: [tokens, heads, size], in float32."""
    torch.manual_seed(0)
    qkv, angles = torch.randn(7, 3, 4, SIZE, dtype=torch.bfloat16), torch.randn(7, SIZE)
    for dim in (1, 2, 3):
        torch._dynamo.mark_static(qkv, dim)
    torch._dynamo.mark_static(angles, 1)

    rotate = rotation("qwen2_vl", "apply_rotary_pos_emb_vision")

    def vision(qkv, cos, sin):
        q, k, _ = qkv.unbind(1)
        return rotate(q, k, cos, sin)

    one = captured(vision, qkv, angles.cos(), angles.sin())
    fuses_to_equal_bits(one, ROTARY)


def test_query_and_key_rotated_apart():
    """Gemma 4 calls its function for each."""
    rotate = rotation("gemma4")

    def apart(q, k, cos, sin):
        return rotate(q, cos, sin), rotate(k, cos, sin)

    one = captured(Heads(apart), *inputs())
    fuses_to_equal_bits(one, ROTARY)


# --- what must not


def rotate(x, cos, sin):
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def both(function):
    return lambda q, k, cos, sin: (function(q, cos, sin), function(k, cos, sin))


def half_used_elsewhere(q, k, cos, sin):
    turned = rotate_half(q)
    return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1), rotate(k, cos, sin), turned


def written_in_between(q, k, cos, sin):
    turned = rotate_half(q)
    q.mul_(2)
    return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1), rotate(k, cos, sin)


def key_from_the_query(q, k, cos, sin):
    q = rotate(q, cos, sin)
    return q, rotate(k + q[:, :2], cos, sin)


REFUSED = {
    "a query alone": lambda q, k, cos, sin: rotate(q, cos, sin),
    "half used elsewhere": half_used_elsewhere,
    "memory written in between": written_in_between,
    "the key depends on the query": key_from_the_query,
    "tables of two": lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos.exp(), sin)),
    "a table for each head": both(lambda x, c, s: x * c[:, None].exp() + rotate_half(x) * s[:, None].exp()),
    "the other way round": both(
        lambda x, c, s: x * c.unsqueeze(1) + torch.cat((x[..., 8:], -x[..., :8]), -1) * s.unsqueeze(1)
    ),
    "unequal halves": both(
        lambda x, c, s: x * c.unsqueeze(1) + torch.cat((-x[..., 4:], x[..., :4]), -1) * s.unsqueeze(1)
    ),
    "swapped without a sign": both(
        lambda x, c, s: x * c.unsqueeze(1) + torch.cat((x[..., 8:], x[..., :8]), -1) * s.unsqueeze(1)
    ),
    "another x": both(lambda x, c, s: x.sin() * c.unsqueeze(1) + rotate_half(x) * s.unsqueeze(1)),
    "a difference": both(lambda x, c, s: x * c.unsqueeze(1) - rotate_half(x) * s.unsqueeze(1)),
    "rounded halves": both(
        lambda x, c, s: x * c.unsqueeze(1) + rotate_half(x.bfloat16()).float() * s.unsqueeze(1)
    ),
    "one row for all tokens": lambda q, k, cos, sin: llama(q, k, cos[:, :1], sin[:, :1]),
    # The op's result would need a copy to lie in memory as this one does.
    "heads before tokens in memory": lambda q, k, cos, sin: llama(q.contiguous(), k.contiguous(), cos, sin),
}


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_match(name):
    one = captured(Heads(REFUSED[name]), *inputs())
    assert one.fuse(ROTARY) == 0
