"""Rotary embedding of adjacent pairs, as the installed transformers write it, becomes one op."""

import pytest
import torch
from expecttest import assert_expected_inline

from dlinfer.graph.passes.fusion.rotary import ROTARY
from dlinfer.graph.passes.fusion.rotary_interleaved import ROTARY_INTERLEAVED
from tests.graph.passes.fusion.capturing import captured, fused_text
from tests.graph.passes.fusion.rotating import SIZE, Heads, fuses_to_equal_bits, inputs, rotation


def repeated(function):
    """Tables that hold each value twice in a row, made in the graph as the model makes them."""

    def rotate(q, k, cos, sin):
        half = cos.shape[-1] // 2
        angles = cos[..., :half].float().acos().repeat_interleave(2, dim=-1)
        return function(q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype))

    return rotate


rotate_gptj = rotation("gptj")


def gptj(q, k, cos, sin):
    cos, sin = cos[..., : SIZE // 2], sin[..., : SIZE // 2]
    return rotate_gptj(q, sin, cos), rotate_gptj(k, sin, cos)


def test_golden_glm():
    graph = captured(Heads(rotation("glm")), *inputs(torch.bfloat16, rotated=8))
    assert_expected_inline(
        fused_text(graph, ROTARY_INTERLEAVED),
        """\
l_q_: bf16[s0, s1, 64]
l_k_: bf16[s0, s1, 32]
l_cos_: bf16[s0, s1, 8]
l_sin_: bf16[s0, s1, 8]
view = aten.view(l_q_, [s0, s1, -1, 16]) -> bf16[s0, s1, 4, 16]
view_1 = aten.view(l_k_, [s0, s1, -1, 16]) -> bf16[s0, s1, 2, 16]
transpose = aten.transpose.int(view, 1, 2) -> bf16[s0, 4, s1, 16]
transpose_1 = aten.transpose.int(view_1, 1, 2) -> bf16[s0, 2, s1, 16]
unsqueeze = aten.unsqueeze(l_cos_, 1) -> bf16[s0, 1, s1, 8]
unsqueeze_1 = aten.unsqueeze(l_sin_, 1) -> bf16[s0, 1, s1, 8]
slice_1 = aten.slice.Tensor(unsqueeze, 3, 0, 4) -> bf16[s0, 1, s1, 4]
repeat_interleave = aten.repeat_interleave.self_int(slice_1, 2, -1) -> bf16[s0, 1, s1, 8]
slice_2 = aten.slice.Tensor(unsqueeze_1, 3, 0, 4) -> bf16[s0, 1, s1, 4]
repeat_interleave_1 = aten.repeat_interleave.self_int(slice_2, 2, -1) -> bf16[s0, 1, s1, 8]
slice_3 = aten.slice.Tensor(transpose, 3, 0, 8) -> bf16[s0, 4, s1, 8]
slice_4 = aten.slice.Tensor(transpose, 3, 8, end) -> bf16[s0, 4, s1, 8]
slice_5 = aten.slice.Tensor(transpose_1, 3, 0, 8) -> bf16[s0, 2, s1, 8]
slice_6 = aten.slice.Tensor(transpose_1, 3, 8, end) -> bf16[s0, 2, s1, 8]
mul = aten.mul.Tensor(slice_3, repeat_interleave) -> bf16[s0, 4, s1, 8]
slice_7 = aten.slice.Tensor(slice_3, 3, 0, end, 2) -> bf16[s0, 4, s1, 4]
slice_8 = aten.slice.Tensor(slice_3, 3, 1, end, 2) -> bf16[s0, 4, s1, 4]
neg = aten.neg(slice_8) -> bf16[s0, 4, s1, 4]
stack = aten.stack([neg, slice_7], -1) -> bf16[s0, 4, s1, 4, 2]
flatten = aten.flatten.using_ints(stack, -2) -> bf16[s0, 4, s1, 8]
mul_1 = aten.mul.Tensor(flatten, repeat_interleave_1) -> bf16[s0, 4, s1, 8]
add = aten.add.Tensor(mul, mul_1) -> bf16[s0, 4, s1, 8]
mul_2 = aten.mul.Tensor(slice_5, repeat_interleave) -> bf16[s0, 2, s1, 8]
slice_9 = aten.slice.Tensor(slice_5, 3, 0, end, 2) -> bf16[s0, 2, s1, 4]
slice_10 = aten.slice.Tensor(slice_5, 3, 1, end, 2) -> bf16[s0, 2, s1, 4]
neg_1 = aten.neg(slice_10) -> bf16[s0, 2, s1, 4]
stack_1 = aten.stack([neg_1, slice_9], -1) -> bf16[s0, 2, s1, 4, 2]
flatten_1 = aten.flatten.using_ints(stack_1, -2) -> bf16[s0, 2, s1, 8]
mul_3 = aten.mul.Tensor(flatten_1, repeat_interleave_1) -> bf16[s0, 2, s1, 8]
add_1 = aten.add.Tensor(mul_2, mul_3) -> bf16[s0, 2, s1, 8]
cat = aten.cat([add, slice_4], -1) -> bf16[s0, 4, s1, 16]
cat_1 = aten.cat([add_1, slice_6], -1) -> bf16[s0, 2, s1, 16]
return [cat, cat_1]
--->
l_q_: bf16[s0, s1, 64]
l_k_: bf16[s0, s1, 32]
l_cos_: bf16[s0, s1, 8]
l_sin_: bf16[s0, s1, 8]
view = aten.view(l_q_, [s0, s1, -1, 16]) -> bf16[s0, s1, 4, 16]
view_1 = aten.view(l_k_, [s0, s1, -1, 16]) -> bf16[s0, s1, 2, 16]
transpose = aten.transpose.int(view, 1, 2) -> bf16[s0, 4, s1, 16]
transpose_1 = aten.transpose.int(view_1, 1, 2) -> bf16[s0, 2, s1, 16]
unsqueeze = aten.unsqueeze(l_cos_, 1) -> bf16[s0, 1, s1, 8]
unsqueeze_1 = aten.unsqueeze(l_sin_, 1) -> bf16[s0, 1, s1, 8]
slice_1 = aten.slice.Tensor(unsqueeze, 3, 0, 4) -> bf16[s0, 1, s1, 4]
slice_2 = aten.slice.Tensor(unsqueeze_1, 3, 0, 4) -> bf16[s0, 1, s1, 4]
slice_3 = aten.slice.Tensor(transpose, 3, 0, 8) -> bf16[s0, 4, s1, 8]
slice_4 = aten.slice.Tensor(transpose, 3, 8, end) -> bf16[s0, 4, s1, 8]
slice_5 = aten.slice.Tensor(transpose_1, 3, 0, 8) -> bf16[s0, 2, s1, 8]
slice_6 = aten.slice.Tensor(transpose_1, 3, 8, end) -> bf16[s0, 2, s1, 8]
transpose_int = aten.transpose.int(slice_3, 1, 2) -> bf16[s0, s1, 4, 8]
transpose_int_1 = aten.transpose.int(slice_1, 1, 2) -> bf16[s0, s1, 1, 4]
transpose_int_2 = aten.transpose.int(slice_2, 1, 2) -> bf16[s0, s1, 1, 4]
apply_rotary_pos_emb_interleaved_default = dlinfer.apply_rotary_pos_emb_interleaved(transpose_int,
    transpose_int_1, transpose_int_2, False) -> bf16[s0, s1, 4, 8]
transpose_int_3 = aten.transpose.int(apply_rotary_pos_emb_interleaved_default, 1, 2) -> bf16[s0, 4, s1, 8]
transpose_int_4 = aten.transpose.int(slice_5, 1, 2) -> bf16[s0, s1, 2, 8]
transpose_int_5 = aten.transpose.int(slice_1, 1, 2) -> bf16[s0, s1, 1, 4]
transpose_int_6 = aten.transpose.int(slice_2, 1, 2) -> bf16[s0, s1, 1, 4]
apply_rotary_pos_emb_interleaved_default_1 = dlinfer.apply_rotary_pos_emb_interleaved(transpose_int_4,
    transpose_int_5, transpose_int_6, False) -> bf16[s0, s1, 2, 8]
transpose_int_7 = aten.transpose.int(apply_rotary_pos_emb_interleaved_default_1, 1, 2) -> bf16[s0, 2, s1, 8]
cat = aten.cat([transpose_int_3, slice_4], -1) -> bf16[s0, 4, s1, 16]
cat_1 = aten.cat([transpose_int_7, slice_6], -1) -> bf16[s0, 2, s1, 16]
return [cat, cat_1]
""",
    )


def test_golden_deepseek():
    graph = captured(Heads(rotation("deepseek_v3", "apply_rotary_pos_emb_interleave")), *inputs())
    assert_expected_inline(
        fused_text(graph, ROTARY_INTERLEAVED),
        """\
l_q_: f32[s0, s1, 64]
l_k_: f32[s0, s1, 32]
l_cos_: f32[s0, s1, 16]
l_sin_: f32[s0, s1, 16]
view = aten.view(l_q_, [s0, s1, -1, 16]) -> f32[s0, s1, 4, 16]
view_1 = aten.view(l_k_, [s0, s1, -1, 16]) -> f32[s0, s1, 2, 16]
transpose = aten.transpose.int(view, 1, 2) -> f32[s0, 4, s1, 16]
transpose_1 = aten.transpose.int(view_1, 1, 2) -> f32[s0, 2, s1, 16]
slice_1 = aten.slice.Tensor(l_cos_, 2, 0, 8) -> f32[s0, s1, 8]
unsqueeze = aten.unsqueeze(slice_1, 1) -> f32[s0, 1, s1, 8]
slice_2 = aten.slice.Tensor(l_sin_, 2, 0, 8) -> f32[s0, s1, 8]
unsqueeze_1 = aten.unsqueeze(slice_2, 1) -> f32[s0, 1, s1, 8]
slice_3 = aten.slice.Tensor(transpose, 3, 0, end, 2) -> f32[s0, 4, s1, 8]
slice_4 = aten.slice.Tensor(transpose, 3, 1, end, 2) -> f32[s0, 4, s1, 8]
slice_5 = aten.slice.Tensor(transpose_1, 3, 0, end, 2) -> f32[s0, 2, s1, 8]
slice_6 = aten.slice.Tensor(transpose_1, 3, 1, end, 2) -> f32[s0, 2, s1, 8]
mul = aten.mul.Tensor(slice_3, unsqueeze) -> f32[s0, 4, s1, 8]
mul_1 = aten.mul.Tensor(slice_4, unsqueeze_1) -> f32[s0, 4, s1, 8]
sub = aten.sub.Tensor(mul, mul_1) -> f32[s0, 4, s1, 8]
mul_2 = aten.mul.Tensor(slice_4, unsqueeze) -> f32[s0, 4, s1, 8]
mul_3 = aten.mul.Tensor(slice_3, unsqueeze_1) -> f32[s0, 4, s1, 8]
add = aten.add.Tensor(mul_2, mul_3) -> f32[s0, 4, s1, 8]
cat = aten.cat([sub, add], -1) -> f32[s0, 4, s1, 16]
mul_4 = aten.mul.Tensor(slice_5, unsqueeze) -> f32[s0, 2, s1, 8]
mul_5 = aten.mul.Tensor(slice_6, unsqueeze_1) -> f32[s0, 2, s1, 8]
sub_1 = aten.sub.Tensor(mul_4, mul_5) -> f32[s0, 2, s1, 8]
mul_6 = aten.mul.Tensor(slice_6, unsqueeze) -> f32[s0, 2, s1, 8]
mul_7 = aten.mul.Tensor(slice_5, unsqueeze_1) -> f32[s0, 2, s1, 8]
add_1 = aten.add.Tensor(mul_6, mul_7) -> f32[s0, 2, s1, 8]
cat_1 = aten.cat([sub_1, add_1], -1) -> f32[s0, 2, s1, 16]
return [cat, cat_1]
--->
l_q_: f32[s0, s1, 64]
l_k_: f32[s0, s1, 32]
l_cos_: f32[s0, s1, 16]
l_sin_: f32[s0, s1, 16]
view = aten.view(l_q_, [s0, s1, -1, 16]) -> f32[s0, s1, 4, 16]
view_1 = aten.view(l_k_, [s0, s1, -1, 16]) -> f32[s0, s1, 2, 16]
transpose = aten.transpose.int(view, 1, 2) -> f32[s0, 4, s1, 16]
transpose_1 = aten.transpose.int(view_1, 1, 2) -> f32[s0, 2, s1, 16]
slice_1 = aten.slice.Tensor(l_cos_, 2, 0, 8) -> f32[s0, s1, 8]
unsqueeze = aten.unsqueeze(slice_1, 1) -> f32[s0, 1, s1, 8]
slice_2 = aten.slice.Tensor(l_sin_, 2, 0, 8) -> f32[s0, s1, 8]
unsqueeze_1 = aten.unsqueeze(slice_2, 1) -> f32[s0, 1, s1, 8]
apply_rotary_pos_emb_interleaved_default = dlinfer.apply_rotary_pos_emb_interleaved(transpose, unsqueeze,
    unsqueeze_1, True) -> f32[s0, 4, s1, 16]
apply_rotary_pos_emb_interleaved_default_1 = dlinfer.apply_rotary_pos_emb_interleaved(transpose_1, unsqueeze,
    unsqueeze_1, True) -> f32[s0, 2, s1, 16]
return [apply_rotary_pos_emb_interleaved_default, apply_rotary_pos_emb_interleaved_default_1]
""",
    )


FAMILIES = {
    "cohere": (repeated(rotation("cohere")), SIZE, True),
    "deepseek_v3": (rotation("deepseek_v3", "apply_rotary_pos_emb_interleave"), SIZE, True),
    "ernie4_5": (rotation("ernie4_5"), SIZE, True),
    "glm": (rotation("glm"), 8, True),
    "gptj": (gptj, SIZE, False),
    "helium": (rotation("helium"), SIZE, True),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_function(family, dtype):
    """Products and sum are rounded where the model rounds them, so that results are equal bit by bit."""
    function, rotated, heads_first = FAMILIES[family]
    one = captured(Heads(function, heads_first=heads_first), *inputs(dtype, rotated=rotated))
    assert one.fuse(ROTARY) == 0
    fuses_to_equal_bits(one, ROTARY_INTERLEAVED, times=2)
    assert one.count("aten.neg") == one.count("aten.stack") == 0


def pairs(x, *, negative=True):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((-odd if negative else odd, even), dim=-1).flatten(-2)


def doubled(table):
    return table[..., : SIZE // 2].repeat_interleave(2, dim=-1).unsqueeze(1)


def used_elsewhere(q, k, cos, sin):
    turned = pairs(q)
    return q * doubled(cos) + turned * doubled(sin), turned


def written_in_between(q, k, cos, sin):
    turned = pairs(q)
    q.mul_(2)
    return q * doubled(cos) + turned * doubled(sin)


def halves(q, k, cos, sin, *, mixed=False):
    even, odd = q[..., 0::2], q[..., 1::2]
    cos, sin = (table[..., : SIZE // 2].unsqueeze(1) for table in (cos, sin))
    other = cos if mixed else sin
    return torch.cat([even * cos - odd * sin, odd * cos - even * other], dim=-1)


REFUSED = {
    "pairs used elsewhere": used_elsewhere,
    "memory written in between": written_in_between,
    # Nothing says that both values of a pair are the same here.
    "a table that may hold any value": lambda q, k, c, s: q * c.unsqueeze(1) + pairs(q) * s.unsqueeze(1),
    "repeated in blocks": lambda q, k, c, s: (
        q * doubled(c) + pairs(q) * s[..., :8].repeat(1, 1, 2).unsqueeze(1)
    ),
    "no sign": lambda q, k, c, s: q * doubled(c) + pairs(q, negative=False) * doubled(s),
    "another x": lambda q, k, c, s: q.sin() * doubled(c) + pairs(q) * doubled(s),
    "a difference": lambda q, k, c, s: q * doubled(c) - pairs(q) * doubled(s),
    "halves turned the other way": halves,
    "halves by other tables": lambda *given: halves(*given, mixed=True),
    "complex numbers": lambda q, k, c, s: torch.view_as_real(
        torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
        * torch.polar(c[..., :8], s[..., :8]).unsqueeze(1)
    ).flatten(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_match(name):
    one = captured(Heads(REFUSED[name]), *inputs())
    assert one.fuse(ROTARY_INTERLEAVED) == 0
