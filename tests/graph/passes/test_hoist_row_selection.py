"""A choice of rows at a graph's end moves in front of the layers that treat each row by itself."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dlinfer import ops
from dlinfer.graph.ir.dialect import op_name, tensors_of
from dlinfer.graph.passes.hoist_row_selection import HOIST_ROW_SELECTION
from dlinfer.graph.passes.registry import RULES
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
        golden(clean(select_last, X, ROWS), HOIST_ROW_SELECTION),
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


def spares(function, *args, dynamic: bool = True) -> int:
    """How many choices move up, after a check that results stay what they are."""
    count, now, before = changes(clean(function, *args, dynamic=dynamic), HOIST_ROW_SELECTION)
    torch.testing.assert_close(now, before)
    return count.get("hoist_row_selection", 0)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("rows", [[4], [0, 3, 3, 1], [], list(range(5))], ids=str)
def test_any_rows(rows, dynamic):
    assert spares(select_last, X, torch.tensor(rows, dtype=torch.int64), dynamic=dynamic) == 1


@pytest.mark.parametrize("chosen", [slice(-1, None), slice(1, 4), slice(0, 5, 2)], ids=str)
def test_a_slice_in_front_of_a_head(chosen):
    head = nn.Linear(8, 20)
    assert spares(lambda x: head(LAYER(x)[:, chosen]), X) == 1


def test_sequences_may_be_rows_too():
    assert spares(lambda x, rows: LAYER(x).index_select(0, rows), X, torch.tensor([1])) == 1


def test_through_other_shapes():
    def flat(x, rows):
        hidden = LAYER(x.flatten(0, 1)).unflatten(0, (1, -1))
        return hidden.index_select(1, rows)

    assert spares(flat, X[:1], ROWS) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_product_in_8_bits(dtype):
    weight, scale = ops.dynamic_quant(torch.randn(12, 8), dtype)

    def quantised(x, rows):
        codes, scales = ops.dynamic_quant(x * 2, dtype)
        return ops.linear_w8a8(codes, weight, scales, scale, x.dtype, dtype, None).index_select(1, rows)

    assert spares(quantised, X, ROWS) == 1


def test_products_in_float8_with_scales_of_their_own():
    weight = torch.randn(8, 8).to(torch.float8_e4m3fn)
    fixed, blocks = torch.ones(1), torch.ones(1, 1)

    def quantised(x, rows):
        hidden = ops.linear_static_fp8(x, weight, torch.ones(8), fixed, None)
        return ops.linear_blocked_fp8(hidden, weight, blocks, None, 16, False).index_select(1, rows)

    assert spares(quantised, X, ROWS) == 1


def test_experts_in_8_bits():
    gate_up, gate_up_scales = ops.dynamic_quant(torch.randn(3, 12, 8), torch.int8)
    down, down_scales = ops.dynamic_quant(torch.randn(3, 8, 6), torch.int8)
    parts = gate_up, gate_up_scales, down, down_scales

    def experts(x, logits, rows):
        weights, ids = ops.moe_gating_topk_softmax(logits, 2)
        return ops.fused_moe_w8a8(x * 2, *parts, weights, ids, 2, True).index_select(0, rows)

    assert spares(experts, X[0], torch.randn(5, 3), ROWS) == 1


def test_an_adapter_for_each_token():
    a, b = torch.randn(3, 8), torch.randn(3, 8)
    adapters = torch.tensor([0, 1]), torch.tensor([1, 2]), torch.ones(2)

    def adapted(x, ids, rows):
        return ops.lora_linear(LAYER.into(x), x, a, b, *adapters, ids).index_select(0, rows)

    assert spares(adapted, X[0], torch.tensor([1, -1, 0, 1, 0]), ROWS) == 1


class TestWhatStays:
    """Code in which nothing may move, or nothing is gained."""

    def test_a_choice_of_columns(self):
        assert spares(lambda x, rows: LAYER(x).index_select(2, rows), X, ROWS) == 0

    def test_rows_that_others_read(self):
        def read(x, rows):
            hidden = LAYER(x)
            return hidden.index_select(1, rows), hidden.sum()

        assert spares(read, X, ROWS) == 0

    def test_a_residual_that_others_read_is_chosen_from_and_not_computed_anew(self):
        def read(x, rows):
            first = LAYER(x)
            return LAYER(first).index_select(1, rows), first.sum()

        assert spares(read, X, ROWS) == 1

    def test_what_mixes_rows(self):
        assert spares(lambda x, rows: LAYER(x).cumsum(1).index_select(1, rows), X, ROWS) == 0
        assert spares(lambda x, rows: LAYER(x).softmax(1).index_select(1, rows), X, ROWS) == 0

    def test_rows_that_the_layer_itself_tells(self):
        def told(x):
            hidden = LAYER(x)
            return hidden.index_select(1, hidden.sum((0, 2)).argsort())

        assert spares(told, X) == 0

    def test_a_table_whose_rows_are_read_many_times(self):
        def experts(x, rows):
            return LAYER(LAYER(x).index_select(1, rows))

        assert spares(experts, X, ROWS) == 0

    def test_a_slice_that_the_caller_is_given(self):
        assert spares(lambda x: LAYER(x)[:, -1:], X) == 0

    def test_what_is_written_in_between(self):
        def written(x, rows):
            hidden = LAYER(x)
            rows.copy_(torch.arange(3))
            return hidden.index_select(1, rows)

        assert spares(written, X, ROWS.clone()) == 0

    def test_memory_that_is_written(self):
        def written(x, rows):
            hidden = functional.linear(x, LAYER.into.weight)
            hidden.view(-1)[:8].zero_()
            return (hidden * 2).index_select(1, rows)

        assert spares(written, X, ROWS) == 0

    def test_rows_that_are_columns_too(self):
        def of_itself(x, rows):
            return functional.linear(x[0] * 2, x[0] * 2).index_select(0, rows)

        def of_what_it_is_made_of(x, rows):
            doubled = x[0] * 2
            return functional.linear(doubled + 1, doubled).index_select(0, rows)

        assert spares(of_itself, X, ROWS) == 0
        assert spares(of_what_it_is_made_of, X, ROWS) == 1

    def test_random_numbers(self):
        def drawn(x, rows):
            return functional.dropout(LAYER.into(x), 0.5, training=True).index_select(1, rows)

        assert fired(drawn, X, ROWS, steps=(HOIST_ROW_SELECTION,)) == {}

    def test_nothing_to_spare(self):
        assert spares(lambda x, rows: (x * 2).index_select(1, rows), X, ROWS) == 0


def test_an_operand_that_is_the_same_for_all_rows():
    def scaled(x, rows, of_all, of_each):
        return (LAYER.into(x) * of_all * of_each + 1).index_select(1, rows)

    assert spares(scaled, X, ROWS, torch.randn(1, 8), torch.randn(5, 1)) == 1


@pytest.mark.parametrize(
    "family, config, sizes",
    [
        (Qwen2ForCausalLM, Qwen2Config, {}),
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        ),
    ],
    ids=["qwen2", "qwen3_moe"],
)
def test_models_of_transformers(family, config, sizes):
    """Of a prompt's last layer what follows attention is of one row: its projection, two products, then the head."""
    model = filled(family(tiny(config, num_hidden_layers=2, **sizes)))
    ids = torch.randint(0, 64, (1, 7))
    one = clean(lambda ids: model(ids, logits_to_keep=1, use_cache=False).logits, ids)
    count, now, before = changes(one, *RULES, HOIST_ROW_SELECTION)
    torch.testing.assert_close(now, before)
    assert count["hoist_row_selection"] == 1
    products = ("aten.linear", "dlinfer.linears", "dlinfer.fused_moe")
    nodes = [node for node in one.graph_module.graph.nodes if op_name(node) in products]
    assert [rows_of(node) == 1 for node in nodes[-5:]] == [False, True, True, True, True]


def rows_of(node) -> int:
    first, *_ = tensors_of(node)
    return first.shape[:-1].numel()
