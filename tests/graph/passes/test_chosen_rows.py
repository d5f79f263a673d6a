"""A choice of rows at a graph's end moves in front of the layers that treat each row by itself."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dlinfer import ops
from dlinfer.graph.passes.chosen_rows import CHOSEN_ROWS
from dlinfer.graph.passes.fusion.rules import RULES
from tests.graph.passes.fusion.fusing import changes, clean, filled, fired, golden, tiny

X = torch.randn(2, 5, 8)
ROWS = torch.tensor([4, 0, 2])


class Layer(nn.Module):
    """A layer of a model behind attention, in our ops: a product, a norm, a residual, a gate, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(6, 8, bias=False)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        normed, residual = ops.add_rms_norm(self.into(x), x, self.weight, 1e-6)
        return self.down(ops.silu_and_mul(self.up(normed))) + residual


LAYER = Layer()


def select_last(x, rows):
    return LAYER(x).index_select(1, rows)


def test_a_layer():
    assert_expected_inline(
        golden(clean(select_last, X, ROWS), CHOSEN_ROWS),
        """\
g_layer_modules_into_parameters_weight_: f32[8, 8] static
g_layer_modules_into_parameters_bias_: f32[8] static
l_x_: f32[s0, s1, 8]
g_layer_parameters_weight_: f32[8] static
g_layer_modules_up_parameters_weight_: f32[12, 8] static
g_layer_modules_up_parameters_bias_: f32[12] static
g_layer_modules_down_parameters_weight_: f32[8, 6] static
l_rows_: i64[s2]
linear = aten.linear(l_x_, g_layer_modules_into_parameters_weight_, g_layer_modules_into_parameters_bias_) ->
    f32[s0, s1, 8]
add_rms_norm = dlinfer.add_rms_norm(linear, l_x_, g_layer_parameters_weight_, 1e-06) -> (f32[s0, s1, 8],
    f32[s0, s1, 8])
getitem = operator.getitem(add_rms_norm, 0) -> f32[s0, s1, 8]
getitem_1 = operator.getitem(add_rms_norm, 1) -> f32[s0, s1, 8]
linear_1 = aten.linear(getitem, g_layer_modules_up_parameters_weight_, g_layer_modules_up_parameters_bias_) ->
    f32[s0, s1, 12]
silu_and_mul = dlinfer.silu_and_mul(linear_1) -> f32[s0, s1, 6]
linear_2 = aten.linear(silu_and_mul, g_layer_modules_down_parameters_weight_) -> f32[s0, s1, 8]
add = aten.add.Tensor(linear_2, getitem_1) -> f32[s0, s1, 8]
index_select = aten.index_select(add, 1, l_rows_) -> f32[s0, s2, 8]
return [index_select]
--->
g_layer_modules_into_parameters_weight_: f32[8, 8] static
g_layer_modules_into_parameters_bias_: f32[8] static
l_x_: f32[s0, s1, 8]
g_layer_parameters_weight_: f32[8] static
g_layer_modules_up_parameters_weight_: f32[12, 8] static
g_layer_modules_up_parameters_bias_: f32[12] static
g_layer_modules_down_parameters_weight_: f32[8, 6] static
l_rows_: i64[s2]
index_select_default = aten.index_select(l_x_, 1, l_rows_) -> f32[s0, s2, 8]
linear_default = aten.linear(index_select_default, g_layer_modules_into_parameters_weight_,
    g_layer_modules_into_parameters_bias_) -> f32[s0, s2, 8]
add_rms_norm_default = dlinfer.add_rms_norm(linear_default, index_select_default, g_layer_parameters_weight_,
    1e-06) -> (f32[s0, s2, 8], f32[s0, s2, 8])
getitem_2 = operator.getitem(add_rms_norm_default, 0) -> f32[s0, s2, 8]
getitem_3 = operator.getitem(add_rms_norm_default, 1) -> f32[s0, s2, 8]
linear_default_1 = aten.linear(getitem_2, g_layer_modules_up_parameters_weight_,
    g_layer_modules_up_parameters_bias_) -> f32[s0, s2, 12]
silu_and_mul_default = dlinfer.silu_and_mul(linear_default_1) -> f32[s0, s2, 6]
linear_default_2 = aten.linear(silu_and_mul_default, g_layer_modules_down_parameters_weight_) -> f32[s0, s2,
    8]
add_tensor = aten.add.Tensor(linear_default_2, getitem_3) -> f32[s0, s2, 8]
return [add_tensor]
""",
    )


def test_results_stay():
    count, now, before = changes(clean(select_last, X, ROWS), CHOSEN_ROWS)
    assert count == {"chosen_rows": 1}
    torch.testing.assert_close(now, before)
