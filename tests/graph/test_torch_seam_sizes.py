"""The seam's second file: each private name of torch that graphs in files need, on a small case."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from dlinfer.graph.size_text import SizeTextError, parse_size
from dlinfer.graph.torch_seam import mode_of
from dlinfer.graph.torch_seam_sizes import (
    conditions_of,
    declared_range,
    fake_of_any_length,
    from_on,
    is_dispatched,
    new_symbol,
    strict_mode,
    symbols_of,
    to_size,
    undecided_errors,
)


def fakes(*shapes, **ranges):
    mode = strict_mode()
    made: dict[Any, Any] = {
        name: new_symbol(mode, number, *limits) for number, (name, limits) in enumerate(ranges.items())
    }
    with mode:
        return (
            mode,
            made,
            [torch.empty([made.get(one, one) for one in shape]) for shape in shapes],
        )


def test_a_symbol_that_may_be_one_is_unknown_and_others_have_an_example():
    mode, made, (x,) = fakes(("a", "b", 8), a=(1, 64, 5), b=(2, None, 7))
    with pytest.raises(undecided_errors()):
        bool(made["a"] == 1)
    names = {value.node.expr: name for name, value in made.items()}
    assert set(symbols_of(x)) == set(names)
    assert [str(one) for one in conditions_of(mode, {})] == []
    assert declared_range(made["a"].node.expr, mode, {}) == (1, 64, None)
    assert bool(made["b"] == 7)  # by a guard


def test_sizes_and_conditions_are_translated():
    mode, made, _ = fakes(a=(2, 64, 6), b=(2, 64, 8))
    a, b = made["a"], made["b"]
    names = {value.node.expr: name for name, value in made.items()}
    for value, text in [(a * b, "a * b"), ((a + 3) // 4, "(a + 3) // 4"), (a % 5, "a % 5"), (a * a, "a * a")]:
        size = to_size(value, names)
        for one, other in ((6, 8), (13, 9)):
            given = {"a": one, "b": other}
            assert size.evaluate(given) == parse_size(text).evaluate(given)
    assert to_size(5, names).what == 5
    with pytest.raises(SizeTextError, match="size of no input"):
        to_size(a, {})
    assert bool(a < b)
    assert bool(a % 3 == 0)
    found = conditions_of(mode, names)
    assert all(one.evaluate({"a": 6, "b": 8}) for one in found)
    assert not all(one.evaluate({"a": 7, "b": 8}) for one in found)
    assert not all(one.evaluate({"a": 9, "b": 8}) for one in found)


def test_the_range_that_torch_export_was_told_counts():
    rows = Dim("rows", min=1, max=16)
    program = torch.export.export(nn.ReLU(), (torch.randn(5, 8),), dynamic_shapes=({0: rows},))
    value = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    (symbol,) = symbols_of(value)[:1]
    assert declared_range(symbol, mode_of([value]), program.range_constraints) == (1, 16, 5)
    narrowed = {symbol: from_on(program.range_constraints[symbol], 2)}
    assert declared_range(symbol, mode_of([value]), narrowed) == (2, 16, 5)


def test_no_op_runs_for_real_on_fakes():
    mode, _, _ = fakes()
    with mode, pytest.raises(Exception, match=r"[Ff]ake"):
        _ = torch.add(torch.ones(2), 1) + torch.Tensor(2).new_tensor([1.0]).__class__(torch.ones(2).storage())


def test_ops_of_the_dispatcher_are_told_from_torchscripts():
    assert is_dispatched("aten::add.Tensor")
    assert is_dispatched("aten::sym_size.int")
    assert not is_dispatched("aten::save")
    assert not is_dispatched("aten::nothing")


def test_the_first_size_of_a_fake_is_open():
    mode = strict_mode()
    first, second = (fake_of_any_length(mode, torch.ones(rows, 4)) for rows in (5, 5))
    assert not isinstance(first.shape[0], int)
    assert str(first.shape[0]) == str(second.shape[0])
    assert first.shape[1] == 4
    assert fake_of_any_length(mode, torch.ones(1, 4)).shape[0] == 1
