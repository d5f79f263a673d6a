"""Linear layers of one input as one node."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from dlinfer import ops
from dlinfer.graph.ir.dialect import is_view
from dlinfer.graph.passes.fusion.merged_linears import MERGED_LINEARS
from tests.graph.passes.fusion.fusing import changes, clean, filled, fired, golden, tiny

X = torch.randn(2, 5, 8)


class Layers(nn.Module):
    """Layers by name, and code that calls them."""

    def __init__(self, code, **layers: nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.code = code

    def forward(self, x):
        return self.code(x, **self.layers)


def pair(code, *, bias: bool = True) -> nn.Module:
    return Layers(code, a=nn.Linear(8, 8, bias=bias), b=nn.Linear(8, 8, bias=False))


def test_layers_of_one_input():
    def gate_up(x, a, b):
        return functional.relu(a(x)) + b(x)

    assert_expected_inline(
        golden(clean(pair(gate_up), X), MERGED_LINEARS),
        """\
l_self_modules_layers_modules_a_parameters_weight_: f32[8, 8] static
l_self_modules_layers_modules_a_parameters_bias_: f32[8] static
l_x_: f32[s0, s1, 8]
l_self_modules_layers_modules_b_parameters_weight_: f32[8, 8] static
linear = aten.linear(l_x_, l_self_modules_layers_modules_a_parameters_weight_,
    l_self_modules_layers_modules_a_parameters_bias_) -> f32[s0, s1, 8]
relu = aten.relu(linear) -> f32[s0, s1, 8]
linear_1 = aten.linear(l_x_, l_self_modules_layers_modules_b_parameters_weight_) -> f32[s0, s1, 8]
add = aten.add.Tensor(relu, linear_1) -> f32[s0, s1, 8]
return [add]
--->
l_self_modules_layers_modules_a_parameters_weight_: f32[8, 8] static
l_self_modules_layers_modules_a_parameters_bias_: f32[8] static
l_x_: f32[s0, s1, 8]
l_self_modules_layers_modules_b_parameters_weight_: f32[8, 8] static
linears_default = dlinfer.linears(l_x_, [l_self_modules_layers_modules_a_parameters_weight_,
    l_self_modules_layers_modules_b_parameters_weight_], [l_self_modules_layers_modules_a_parameters_bias_,
    None]) -> (f32[s0, s1, 8], f32[s0, s1, 8])
getitem = operator.getitem(linears_default, 0) -> f32[s0, s1, 8]
getitem_1 = operator.getitem(linears_default, 1) -> f32[s0, s1, 8]
relu = aten.relu(getitem) -> f32[s0, s1, 8]
add = aten.add.Tensor(relu, getitem_1) -> f32[s0, s1, 8]
return [add]
""",
    )


def test_several_groups_and_no_copy_of_weights():
    def two_rounds(x, a, b):
        y = a(x) * b(x)
        return a(y) - b(y)

    one = clean(pair(two_rounds), X)
    count, got, want = changes(one, MERGED_LINEARS)
    assert count == {"merged_linears": 2}
    assert one.count("aten.cat") == one.count("aten.linear") == 0
    torch.testing.assert_close(got, want, rtol=0, atol=0)  # the same products


def test_dlinfers_own_linear():
    weights = (torch.randn(4, 8), torch.randn(6, 8))
    one = clean(lambda x, a, b: (ops.linear(x, a), ops.linear(x, b)), X, *weights)
    count, got, want = changes(one, MERGED_LINEARS)
    assert count == {"merged_linears": 1}
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_views_of_results_stay_views():
    def heads(x, a, b):
        return a(x).view(2, 5, 2, 4).transpose(1, 2) @ b(x).view(2, 5, 2, 4).permute(0, 2, 3, 1)

    one = clean(pair(heads), X)
    changes(one, MERGED_LINEARS)
    views = [
        node
        for node in one.graph_module.graph.nodes
        if node.name.startswith(("view", "transpose", "permute"))
    ]
    assert len(views) == 4
    assert all(map(is_view, views))


# --- what must not match


def one_after_the_other(x, a, b):
    return b(a(x))


def computed_weight(x, a, b):
    return a(x), functional.linear(x, b.weight * 2)


def written_between(x, a, b):
    first = a(x)
    x.add_(1)
    return first, b(x)


def weight_written_between(x, a, b):
    first = a(x)
    b.weight.add_(1)
    return first, b(x)


def far_apart(x, a, b):
    first = a(x)
    for _ in range(3):
        first = first @ first.transpose(1, 2) @ x
    return first, b(x)


def vector_weight(x, a, b):
    return a(x), functional.linear(x, b.weight[0])


@pytest.mark.parametrize(
    "code",
    [one_after_the_other, computed_weight, written_between, weight_written_between, far_apart, vector_weight],
)
def test_no_match(code):
    assert fired(pair(code), X.clone(), steps=(MERGED_LINEARS,)) == {}


def test_near_layers_are_merged_across_two_other_products():
    def latent(x, a, b):
        return functional.linear(a(x), x[0]) + 1, b(x)

    assert fired(pair(latent), X, steps=(MERGED_LINEARS,)) == {"merged_linears": 1}


def test_a_write_to_something_else_between():
    def cached(x, a, b, cache):
        first = a(x)
        cache.copy_(first)
        return first + cache, b(x)

    module = pair(lambda x, a, b: cached(x, a, b, torch.empty_like(x)))
    count, got, want = changes(clean(module, X), MERGED_LINEARS)
    assert count == {"merged_linears": 1}
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# --- transformers

ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
"""Torch's product of a layer alone, and the vendor's of all of them, add up to 32 terms in another order."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_of_llama(dtype):
    one = clean(filled(LlamaMLP(tiny(LlamaConfig)), dtype), torch.randn(2, 5, 32, dtype=dtype))
    count, got, want = changes(one, MERGED_LINEARS)
    assert count == {"merged_linears": 1}
    torch.testing.assert_close(got, want, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_k_and_v_of_qwen2_with_biases(dtype):
    attention = filled(Qwen2Attention(tiny(Qwen2Config, attn_implementation="sdpa"), 0), dtype)
    angles = torch.randn(2, 5, 8, dtype=dtype)
    one = clean(lambda x, cos: attention(x, (cos, cos), None)[0], torch.randn(2, 5, 32, dtype=dtype), angles)
    count, got, want = changes(one, MERGED_LINEARS)
    assert count == {"merged_linears": 1}
    (merged,) = one.graph_module.graph.find_nodes(op="call_function", target=ops.linears.overload)
    assert len(merged.args[1]) == 3
    torch.testing.assert_close(got, want, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])
