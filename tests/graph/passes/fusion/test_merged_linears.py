"""Linear layers of one input as one node.

A merged layer may add its products up in another order than the layer alone. So results are compared bit by bit where
every order gives the same sum: of whole numbers so small that float32, and bfloat16, have all of their sums. Of other
numbers a result keeps to the bound of a sum in any order.
"""

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

X = torch.randint(-2, 3, (2, 5, 8)).float()
FLOAT32_UNIT = 2.0**-24  # the largest relative error of one float32 rounding


def in_whole_numbers(module: nn.Module, *names: str) -> nn.Module:
    """The layers of these names, or all, with weights and biases of -1, 0 and 1."""
    draw = torch.Generator().manual_seed(0)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and (not names or name in names):
            for parameter in layer.parameters():
                parameter.data.copy_(torch.randint(-1, 2, parameter.shape, generator=draw))
    return module


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


class Layers(nn.Module):
    """Layers by name, and code that calls them."""

    def __init__(self, code, **layers: nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.code = code

    def forward(self, x):
        return self.code(x, **dict(self.layers.items()))  # Dynamo of torch 2.12 cannot unpack a ModuleDict


def pair(code, *, bias: bool = True) -> nn.Module:
    return in_whole_numbers(Layers(code, a=nn.Linear(8, 8, bias=bias), b=nn.Linear(8, 8, bias=False)))


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
    assert_same_bits(got, want)


def test_dlinfers_own_linear():
    weights = (torch.randint(-1, 2, (4, 8)).float(), torch.randint(-1, 2, (6, 8)).float())
    one = clean(lambda x, a, b: (ops.linear(x, a), ops.linear(x, b)), X, *weights)
    count, got, want = changes(one, MERGED_LINEARS)
    assert count == {"merged_linears": 1}
    assert_same_bits(got, want)


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
    assert_same_bits(got, want)


# --- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_features", [8, 300])
def test_other_numbers_keep_to_the_bound_of_a_sum_in_any_order(in_features, dtype):
    """As ``ops.linears`` promises it; both the layers alone and merged, against float64.

    A float32 sum of n products errs by at most about n float32 units of the sum of their magnitudes (Higham, Accuracy
    and Stability of Numerical Algorithms, section 4.2), and the sum is rounded to the dtype, without its bias and with.
    """
    x = torch.randn(7, in_features).to(dtype)
    a, b = (torch.randn(n, in_features).to(dtype) for n in (5, 40))
    bias = torch.randn(5).to(dtype)
    one = clean(lambda x, a, b, bias: (functional.linear(x, a, bias), functional.linear(x, b)), x, a, b, bias)
    count, got, want = changes(one, MERGED_LINEARS)
    assert count == {"merged_linears": 1}
    for i, (weight, shift) in enumerate(((a, bias.double()), (b, torch.zeros(40).double()))):
        product = functional.linear(x.double(), weight.double())
        magnitudes = functional.linear(x.double().abs(), weight.double().abs()) + shift.abs()
        rounding = torch.finfo(dtype).eps / 2 * (product.abs() + (product + shift).abs())
        allowed = (in_features + 2) * FLOAT32_UNIT * magnitudes + rounding
        assert all(((result[i].double() - product - shift).abs() <= allowed).all() for result in (got, want))


# --- transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_of_llama(dtype):
    layers = in_whole_numbers(filled(LlamaMLP(tiny(LlamaConfig)), dtype), "gate_proj", "up_proj")
    one = clean(layers, torch.randint(-2, 3, (2, 5, 32)).to(dtype))
    count, got, want = changes(one, MERGED_LINEARS)
    assert count == {"merged_linears": 1}
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_k_and_v_of_qwen2_with_biases(dtype):
    attention = filled(Qwen2Attention(tiny(Qwen2Config, attn_implementation="sdpa"), 0), dtype)
    in_whole_numbers(attention, "q_proj", "k_proj", "v_proj")
    angles = torch.randn(2, 5, 8, dtype=dtype)
    x = torch.randint(-2, 3, (2, 5, 32)).to(dtype)
    one = clean(lambda x, cos: attention(x, (cos, cos), None)[0], x, angles)
    count, got, want = changes(one, MERGED_LINEARS)
    assert count == {"merged_linears": 1}
    (merged,) = one.graph_module.graph.find_nodes(op="call_function", target=ops.linears.overload)
    assert len(merged.args[1]) == 3
    assert_same_bits(got, want)
