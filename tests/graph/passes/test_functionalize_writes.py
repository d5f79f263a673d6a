"""Writes that only their result sees, as results."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch.nn import functional

from dlinfer.graph.passes import functionalize_writes
from dlinfer.graph.passes.functionalize_writes import FUNCTIONALIZE_WRITES
from dlinfer.graph.passes.fusion.sdpa_gqa import WRITTEN_OUT_ATTENTION
from tests.graph.passes.fusion.fusing import changes, clean, fired, golden

X = torch.randn(4, 6)


def renormalised(x):
    weights = x * 2
    weights /= weights.sum(-1, keepdim=True)
    return weights.transpose(0, 1) + 1


def test_a_write_to_what_was_just_made():
    assert_expected_inline(
        golden(clean(renormalised, X), FUNCTIONALIZE_WRITES),
        """\
l_x_: f32[s0, s1]
mul = aten.mul.Tensor(l_x_, 2) -> f32[s0, s1]
sum_1 = aten.sum.dim_IntList(mul, [-1], True) -> f32[s0, 1]
div_ = aten.div_.Tensor(mul, sum_1) -> f32[s0, s1]
transpose = aten.transpose.int(div_, 0, 1) -> f32[s1, s0]
add = aten.add.Tensor(transpose, 1) -> f32[s1, s0]
return [add]
--->
l_x_: f32[s0, s1]
mul = aten.mul.Tensor(l_x_, 2) -> f32[s0, s1]
sum_1 = aten.sum.dim_IntList(mul, [-1], True) -> f32[s0, 1]
div_tensor = aten.div.Tensor(mul, sum_1) -> f32[s0, s1]
transpose = aten.transpose.int(div_tensor, 0, 1) -> f32[s1, s0]
add = aten.add.Tensor(transpose, 1) -> f32[s1, s0]
return [add]
""",
    )


def inverse_permutation(x):
    order = x[:, 0].argsort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return x[inverse]


def two_in_a_row(x):
    return (x * 2).mul_(3).add_(x).clamp_(min=0)


def reshaped_later(x):
    y = (x[None] * 2).add_(1)
    product = y * x
    y.squeeze_(0)
    return product, y


@pytest.mark.parametrize(
    ("code", "count"),
    [(renormalised, 1), (inverse_permutation, 1), (two_in_a_row, 3), (reshaped_later, 2)],
)
def test_private(code, count):
    fired, got, want = changes(clean(code, X), FUNCTIONALIZE_WRITES)
    assert fired == {"functionalize_writes": count}
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def to_an_input(x):
    return x.mul_(2) + 1


def seen_again(x):
    y = x * 2
    z = y.view(-1)
    y.add_(1)
    return z + 1


def part_of_something_larger(x):
    y = x * 2
    y[0].add_(1)
    return y


def result_unused(x):
    y = x * 2
    y.copy_(x + 1)
    return y * 3


def narrower(x):
    return (x * 2).bfloat16().add_(x) + 1


def through_a_list(x):
    first, _ = (x * 2).chunk(2)
    first.add_(1)
    return first + _.sum()


def other_memory(x):
    y = x * 2
    y.set_(x + 1)
    return y * 3


def argument_in_other_memory(x):
    x.data = x + 1
    return x * 3


def argument_in_other_memory_written(x):
    x.data = x + 1
    return x.add_(1)


NO_MATCH = [
    to_an_input,
    seen_again,
    part_of_something_larger,
    narrower,
    other_memory,
    argument_in_other_memory,
    argument_in_other_memory_written,
]


@pytest.mark.parametrize("code", NO_MATCH)
def test_no_match(code):
    one = clean(code, X.clone())
    want = one.run()
    assert fired(code, X.clone(), steps=(FUNCTIONALIZE_WRITES,)) == {}
    torch.testing.assert_close(one.run(), want, rtol=0, atol=0)


@pytest.mark.parametrize("code", [result_unused, through_a_list])
def test_results_stay(code):
    _, got, want = changes(clean(code, X), FUNCTIONALIZE_WRITES)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_patterns_show_through():
    def attention(q, k, v, mask):
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores *= 0.5
        scores += mask
        return torch.matmul(functional.softmax(scores, -1), v).transpose(1, 2).contiguous()

    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    one = clean(attention, q, k, v, torch.zeros(2, 1, 5, 5))
    count, got, want = changes(one, FUNCTIONALIZE_WRITES, WRITTEN_OUT_ATTENTION)
    assert count == {"functionalize_writes": 2, "written_out_attention": 1}
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)  # float32 sums in another order


def many_writes(count):
    def code(x):
        y = x * 2
        for number in range(count):
            z = (x + number).add_(y)
            y.mul_(2).add_(z)
        return y

    return code


def test_each_node_is_looked_at_a_few_times(monkeypatch):
    """Not all nodes for each write."""
    asked = []
    storages = functionalize_writes.storages
    monkeypatch.setattr(functionalize_writes, "storages", lambda node: asked.append(node) or storages(node))
    one = clean(many_writes(50), X)
    nodes = len(one.graph_module.graph.nodes)
    assert len(FUNCTIONALIZE_WRITES.run(one.graph_module)) == 150
    assert len(asked) < 5 * nodes
