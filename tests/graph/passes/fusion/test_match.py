"""What rules ask while they walk a graph, on captured graphs."""

import pytest
import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.passes.fusion import match
from dlinfer.graph.passes.fusion.match import aten
from tests.graph.passes.fusion.capturing import captured


def result(function, *args, dynamic=True) -> fx.Node:
    """The node that computes the one result of a function."""
    graph = captured(function, *args, dynamic=dynamic).graph_module.graph
    return graph.output_node().all_input_nodes[0]


X = torch.randn(3, 4, 8)


def test_operands_come_in_both_orders_and_not_with_alpha():
    node = result(torch.add, X, torch.randn(8))
    (a, b), (c, d) = match.operands(node, aten.add.Tensor)
    assert (a, b) == (d, c)
    assert list(match.operands(node, aten.mul.Tensor)) == []
    assert list(match.operands(result(lambda x: torch.add(x, x.sin(), alpha=2), X), aten.add.Tensor)) == []
    assert len(list(match.operands(result(lambda x: x + x, X), aten.add.Tensor))) == 1  # both orders are one


@pytest.mark.parametrize("function", [lambda x: x + 0.5, lambda x: 0.5 + x], ids=["right", "left"])
def test_scalar_operand(function):
    tensor, number = match.scalar_operand(result(function, X), *match.ADD) or (None, None)
    assert isinstance(tensor, fx.Node) and tensor.op == "placeholder"
    assert number == 0.5


def test_a_tensor_is_no_scalar_operand():
    assert match.scalar_operand(result(torch.add, X, torch.tensor(0.5)), *match.ADD) is None


@pytest.mark.parametrize(
    "square", [lambda x: x**2, torch.square, lambda x: x * x], ids=["pow", "square", "mul"]
)
def test_squares(square):
    node = match.is_square(result(square, X))
    assert node is not None and node.op == "placeholder"


@pytest.mark.parametrize("other", [lambda x: x**3, lambda x: x * x.sin()])
def test_no_squares(other):
    assert match.is_square(result(other, X)) is None


def test_widening_is_seen_through_and_narrowing_is_not():
    half = X.bfloat16()
    source, casts = match.widened_from(result(lambda x: x.float().double(), half))
    assert source.op == "placeholder" and len(casts) == 2
    narrow = result(lambda x: x.bfloat16(), X)
    assert match.widened_from(narrow) == (narrow, ())
    assert match.cast_source(narrow) is narrow.args[0]
    from_int = result(lambda x: x.float(), torch.arange(3))  # 2^24 + 1 has no float32
    assert match.widened_from(from_int) == (from_int, ())


def test_sizes_are_compared_without_a_guard():
    node = result(lambda x, y: torch.cat([x, y]), X, torch.randn(5, 4, 8))
    rows, columns, features = fake(node).shape
    assert match.same_size(rows, rows) and match.same_size(4, 4)
    assert not match.same_size(rows, columns)  # they may be equal at some call: not for sure is no
    assert not match.same_size(rows, int(X.shape[0]) + 5)
    assert len({str(size) for size in (rows, columns, features)}) == 3


def test_last_dimension():
    assert match.is_last_dim(-1, 3) and match.is_last_dim(2, 3) and match.is_last_dim([-1], 3)
    assert (
        not match.is_last_dim(0, 3) and not match.is_last_dim([-2, -1], 3) and not match.is_last_dim(None, 3)
    )


def test_slices():
    node = result(lambda x: x[..., 1::2], X, dynamic=False)
    source, *bounds = match.slice_of(node) or (None,)
    assert source is node.args[0] and bounds == [2, 1, match.LAST, 2]
    written_out = result(lambda x: torch.narrow(x, 2, 4, 4), X, dynamic=False)
    assert match.slice_of(written_out) is None  # another op: a rule that wants it asks for it
    to_the_end = match.slice_of(result(lambda x: x[:, :, 4:8], X, dynamic=False))
    assert to_the_end is not None and to_the_end[1:] == (2, 4, match.LAST, 1)
    assert not match.is_whole_slice(node)


def test_only_user():
    node = result(lambda x: x.sin() * x, X)
    sine = next(parent for parent in node.all_input_nodes if parent.op == "call_function")
    assert match.only_user(sine) is node
    placeholder = next(parent for parent in node.all_input_nodes if parent.op == "placeholder")
    assert match.only_user(placeholder) is None
