"""Patterns and the predicates beside them, on captured graphs."""

import pytest
import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.passes.fusion import match, pattern, views
from dlinfer.graph.passes.fusion.match import aten
from tests.graph.passes.fusion.capturing import captured


def result(function, *args, dynamic=True) -> fx.Node:
    """The node that computes the one result of a function."""
    graph = captured(function, *args, dynamic=dynamic).graph_module.graph
    return graph.output_node().all_input_nodes[0]


def found(part, function, *args, dynamic=True) -> list[pattern.Bindings]:
    return list(pattern.matches(part, result(function, *args, dynamic=dynamic)))


X = torch.randn(3, 4, 8)
SUM = pattern.call(aten.add.Tensor, "left", "right")


def test_operands_come_in_both_orders_and_not_with_alpha():
    first, second = found(SUM, torch.add, X, torch.randn(8))
    assert (first["left"], first["right"]) == (second["right"], second["left"])
    assert not found(pattern.call(aten.mul.Tensor, "left", "right"), torch.add, X, torch.randn(8))
    assert not found(SUM, lambda x: torch.add(x, x.sin(), alpha=2), X)
    assert len(found(SUM, lambda x: x + x, X)) == 1  # both orders are one


def test_other_arguments_must_have_their_defaults_unless_the_call_is_loose():
    softmax = lambda x: x.softmax(-1, dtype=torch.float32)  # noqa: E731
    assert not found(pattern.call(aten.softmax.int, "x", -1), softmax, X)
    assert found(pattern.call(aten.softmax.int, "x", -1, dtype=...), softmax, X)
    assert found(pattern.loose_call(aten.softmax.int, "x", -1), softmax, X)
    assert found(pattern.loose_call(("aten.softmax.int",), "x"), softmax, X)


@pytest.mark.parametrize("function", [lambda x: x + 0.5, lambda x: 0.5 + x], ids=["right", "left"])
def test_a_number_in_either_order(function):
    (only,) = found(pattern.call(match.ADD, "tensor", pattern.number("half")), function, X)
    assert only["tensor"].op == "placeholder"
    assert only.numbers == {"half": 0.5}


def test_a_tensor_is_no_number():
    part = pattern.call(match.ADD, "tensor", pattern.number("half"))
    assert not found(part, torch.add, X, torch.tensor(0.5))


SQUARE = pattern.any_of(
    pattern.call(aten.pow.Tensor_Scalar, "x", 2),
    pattern.call(aten.square.default, "x"),
    pattern.call(aten.mul.Tensor, "x", "x"),
)


@pytest.mark.parametrize(
    "square", [lambda x: x**2, torch.square, lambda x: x * x], ids=["pow", "square", "mul"]
)
def test_squares(square):
    assert [one["x"].op for one in found(SQUARE, square, X)] == ["placeholder"]


@pytest.mark.parametrize("other", [lambda x: x**3, lambda x: x * x.sin()])
def test_no_squares(other):
    assert not found(SQUARE, other, X)


def test_widening_is_seen_through_and_narrowing_is_not():
    half = X.bfloat16()
    source, casts = match.widened_from(result(lambda x: x.float().double(), half))
    assert source.op == "placeholder" and len(casts) == 2
    narrow = result(lambda x: x.bfloat16(), X)
    assert match.widened_from(narrow) == (narrow, ())
    assert match.cast_source(narrow) is narrow.args[0]
    from_int = result(lambda x: x.float(), torch.arange(3))  # 2^24 + 1 has no float32
    assert match.widened_from(from_int) == (from_int, ())


def test_casts_belong_to_the_match_or_are_shared():
    def cosine(x):
        return x.float().cos()

    (shared,) = found(pattern.call(aten.cos.default, pattern.widened("x")), cosine, X.bfloat16())
    assert (shared["x"].op, len(shared.shared), shared.interior) == ("placeholder", 1, ())
    _, inside = found(pattern.call(aten.cos.default, pattern.through_casts("x")), cosine, X.bfloat16())
    assert (inside["x"].op, len(inside.interior), inside.shared) == ("placeholder", 1, ())


def test_sizes_are_compared_without_a_guard():
    node = result(lambda x, y: torch.cat([x, y]), X, torch.randn(5, 4, 8))
    rows, columns, features = fake(node).shape
    assert match.same_sizes((rows, 4), (rows, 4))
    assert not match.same_sizes([rows], [columns])  # they may be equal at some call: not for sure is no
    assert not match.same_sizes([rows], [int(X.shape[0]) + 5])
    assert len({str(size) for size in (rows, columns, features)}) == 3


@pytest.mark.parametrize("dim", [-1, 2])
def test_dimensions_count_from_the_end(dim):
    assert found(pattern.call(aten.mean.dim, "x", [-1], True), lambda x: x.mean(dim, keepdim=True), X)
    assert found(pattern.call(aten.unsqueeze.default, "x", -2), lambda x: x.unsqueeze(dim - (dim < 0)), X)
    assert not found(pattern.call(aten.mean.dim, "x", [-2], True), lambda x: x.mean(dim, keepdim=True), X)


@pytest.mark.parametrize(
    ("halve", "cut"),
    [
        (lambda x: x.chunk(2, -1), views.halves),
        (lambda x: (x[..., :4], x[:, :, 4:]), views.halves),
        (lambda x: (torch.narrow(x, 2, 0, 4), x.narrow(2, 4, 4)), views.halves),
        (lambda x: (x[..., ::2], x[..., 1::2]), views.evens_and_odds),
        (lambda x: x.unflatten(-1, (4, 2)).unbind(-1), views.evens_and_odds),
    ],
)
def test_parts_of_the_last_dimension_in_every_spelling(halve, cut):
    other = views.halves if cut is views.evens_and_odds else views.evens_and_odds
    product = pattern.call(aten.mul.Tensor, pattern.call(aten.sin.default, "first"), "second")

    def code(x):
        first, second = halve(x)
        return first.sin() * second

    def exchanged(x):
        first, second = halve(x)
        return second.sin() * first

    (only,) = found(pattern.cut_from("x", cut, product), code, X, dynamic=False)
    assert only["x"].op == "placeholder" and only.shared
    assert not found(pattern.cut_from("x", other, product), code, X, dynamic=False)
    assert not found(pattern.cut_from("x", cut, product), exchanged, X, dynamic=False)


def test_only_user():
    node = result(lambda x: x.sin() * x, X)
    sine = next(parent for parent in node.all_input_nodes if parent.op == "call_function")
    assert match.only_user(sine) is node
    placeholder = next(parent for parent in node.all_input_nodes if parent.op == "placeholder")
    assert match.only_user(placeholder) is None
