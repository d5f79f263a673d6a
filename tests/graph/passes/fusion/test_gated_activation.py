"""SwiGLU and GeGLU in plain PyTorch, packed and of two tensors."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.nn import functional
from transformers import GemmaConfig, GlmConfig, LlamaConfig, Phi3Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.glm.modeling_glm import GlmMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from dlinfer.graph.passes.fusion.gated_activation import GATED_GELU, GATED_SILU
from tests.graph.passes.fusion.fusing import changes, clean, filled, fired, golden, tiny

RULES = (GATED_SILU, GATED_GELU)
PACKED = torch.randn(2, 5, 32)
torch._dynamo.mark_static(PACKED, 2)  # as if a layer's weight gave the size
GATE, UP = torch.randn(2, 5, 16), torch.randn(2, 5, 16)

# Eager torch and our kernel each round exp in their own way: a few units of float32's last place apart.
NEAR: Any = {"rtol": 2e-6, "atol": 2e-6}


def chunk(x):
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


# --- goldens


def test_halves_of_one_tensor():
    assert_expected_inline(
        golden(clean(chunk, PACKED), GATED_SILU),
        """\
l_x_: f32[s0, s1, 32]
chunk = aten.chunk(l_x_, 2, -1) -> (f32[s0, s1, 16], f32[s0, s1, 16])
getitem = operator.getitem(chunk, 0) -> f32[s0, s1, 16]
getitem_1 = operator.getitem(chunk, 1) -> f32[s0, s1, 16]
silu = aten.silu(getitem) -> f32[s0, s1, 16]
mul = aten.mul.Tensor(silu, getitem_1) -> f32[s0, s1, 16]
return [mul]
--->
l_x_: f32[s0, s1, 32]
silu_and_mul_default = dlinfer.silu_and_mul(l_x_) -> f32[s0, s1, 16]
return [silu_and_mul_default]
""",
    )


def test_two_tensors():
    assert_expected_inline(
        golden(clean(lambda gate, up: functional.silu(gate) * up, GATE, UP), GATED_SILU),
        """\
l_gate_: f32[s0, s1, s2]
l_up_: f32[s0, s1, s2]
silu = aten.silu(l_gate_) -> f32[s0, s1, s2]
mul = aten.mul.Tensor(silu, l_up_) -> f32[s0, s1, s2]
return [mul]
--->
l_gate_: f32[s0, s1, s2]
l_up_: f32[s0, s1, s2]
silu_mul_default = dlinfer.silu_mul(l_gate_, l_up_) -> f32[s0, s1, s2]
return [silu_mul_default]
""",
    )


def test_gelu():
    one = clean(lambda gate, up: functional.gelu(gate, approximate="tanh") * up, GATE, UP)
    assert_expected_inline(
        golden(one, GATED_GELU),
        """\
l_gate_: f32[s0, s1, s2]
l_up_: f32[s0, s1, s2]
gelu = aten.gelu(l_gate_, approximate=tanh) -> f32[s0, s1, s2]
mul = aten.mul.Tensor(gelu, l_up_) -> f32[s0, s1, s2]
return [mul]
--->
l_gate_: f32[s0, s1, s2]
l_up_: f32[s0, s1, s2]
gelu_mul_default = dlinfer.gelu_mul(l_gate_, l_up_, True) -> f32[s0, s1, s2]
return [gelu_mul_default]
""",
    )


# --- spellings


def split(x):
    gate, up = x.split(x.shape[-1] // 2, dim=-1)
    return up * functional.silu(gate)


def split_sizes(x):
    gate, up = torch.split(x, [16, 16], dim=-1)
    return up * functional.silu(gate)


def slices(x):
    return functional.silu(x[..., :16]) * x[..., 16:]


def unbind(x):
    gate, up = x.unflatten(-1, (2, 16)).unbind(-2)
    return functional.silu(gate) * up


@pytest.mark.parametrize("spelling", [chunk, split, split_sizes, slices, unbind])
def test_packed_spellings(spelling):
    one = clean(spelling, PACKED)
    count, got, want = changes(one, *RULES)
    assert count == {"gated_silu": 1}
    assert one.count("dlinfer.silu_and_mul") == 1
    assert sum(node.op == "call_function" for node in one.graph_module.graph.nodes) == 1  # no view is left
    torch.testing.assert_close(got, want, **NEAR)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_packed_gelu_copies_nothing(approximate):
    def packed(x):
        gate, up = x.chunk(2, dim=-1)
        return functional.gelu(gate, approximate=approximate) * up

    one = clean(packed, PACKED)
    count, got, want = changes(one, *RULES)
    assert count == {"gated_gelu": 1}
    assert one.count("aten.contiguous") == one.count("aten.clone") == 0
    torch.testing.assert_close(got, want, **NEAR)


# --- what must not match


def swapped(x):
    up, gate = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def test_the_second_half_as_gate_is_no_packed_form():
    one = clean(swapped, PACKED)
    count, got, want = changes(one, *RULES)
    assert count == {"gated_silu": 1}
    assert (one.count("dlinfer.silu_mul"), one.count("dlinfer.silu_and_mul")) == (1, 0)
    torch.testing.assert_close(got, want, **NEAR)


def activation_used_elsewhere(gate, up):
    activated = functional.silu(gate)
    return activated * up, activated


def broadcast(gate, up):
    return functional.silu(gate) * up[:, :1]


def promoted(gate, up):
    return functional.silu(gate.bfloat16()) * up


def written_between(gate, up):
    activated = functional.silu(gate)
    gate.add_(1)
    return activated * up


def number(gate, up):
    return functional.silu(gate) * 2.0 + up


def not_contiguous(gate, up):
    return functional.silu(gate.transpose(0, 1)) * up.transpose(0, 1)


@pytest.mark.parametrize(
    "code", [activation_used_elsewhere, broadcast, promoted, written_between, number, not_contiguous]
)
def test_no_match(code):
    assert fired(code, GATE, UP, steps=RULES) == {}


def other_dimension(x):
    gate, up = x.chunk(2, dim=1)
    return functional.silu(gate) * up


def overlapping(x):
    return functional.silu(x[..., :20]) * x[..., 12:]


@pytest.mark.parametrize("code", [other_dimension, overlapping])
def test_other_parts_of_one_tensor_are_two_tensors(code):
    x = torch.randn(2, 6, 32)
    torch._dynamo.mark_static(x)
    one = clean(code, x)
    count, got, want = changes(one, *RULES)
    assert count == {"gated_silu": 1}
    assert one.count("dlinfer.silu_and_mul") == 0
    torch.testing.assert_close(got, want, **NEAR)


def test_a_size_that_may_be_odd():
    x = torch.randn(2, 5, 30)  # its last dimension is symbolic: chunk's halves would differ for 31
    assert fired(chunk, x, steps=RULES) == {}


# --- transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mlp", "config", "rule", "op"),
    [
        (LlamaMLP, LlamaConfig, "gated_silu", "dlinfer.silu_mul"),
        (GemmaMLP, GemmaConfig, "gated_gelu", "dlinfer.gelu_mul"),
        (Phi3MLP, Phi3Config, "gated_silu", "dlinfer.silu_and_mul"),
        (GlmMLP, GlmConfig, "gated_silu", "dlinfer.silu_and_mul"),
    ],
)
def test_transformers(mlp, config, rule, op, dtype):
    one = clean(filled(mlp(tiny(config)), dtype), torch.randn(2, 5, 32, dtype=dtype))
    count, got, want = changes(one, *RULES)
    assert count == {rule: 1}
    assert one.count(op) == 1
    exact: Any = {"rtol": 0, "atol": 0}  # the ops round where the two calls do, in any dtype
    torch.testing.assert_close(got, want, **NEAR if dtype is torch.float32 else exact)
