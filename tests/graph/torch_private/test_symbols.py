"""Symbols of sizes: their ranges, examples and copies."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from dlinfer.graph.torch_private import dynamo, fake_mode, symbol_guards, symbols
from dlinfer.graph.torch_private.fake_mode import environment_of, mode_of, strict_mode
from dlinfer.graph.torch_private.symbol_guards import conditions_of
from dlinfer.graph.torch_private.symbols import (
    declared_range,
    same_expression,
    symbols_of,
)
from tests.graph.torch_private.asking import asked_in_backend, dynamo_mode, tall
from tests.graph.torch_private.fakes import fakes


def test_sized_symbols_give_values_and_source():
    found = asked_in_backend(lambda: symbols.sized_symbols(dynamo_mode()), tall, torch.ones(5, 7))
    assert sorted(found.values()) == ["2 and more, x.size()[1]", "4 and more, x.size()[0]"]


def test_example_numbers_are_those_of_the_captured_call():
    def numbers():
        environment = dynamo_mode().shape_env
        assert environment is not None
        made = [
            environment.create_symintnode(symbol, hint=int(environment.backed_var_to_val[symbol]))
            for symbol in environment.var_to_sources
        ]
        return sorted(symbols.example_number(number) for number in made)

    assert asked_in_backend(numbers, tall, torch.ones(5, 7)) == [5, 7]
    assert symbols.example_number(3) == 3


def test_symbols_ranges_and_copies_of_them():
    def questions():
        mode: Any = dynamo.dynamo_fake_mode()
        (symbol, *_) = mode.shape_env.var_to_sources
        hint = int(mode.shape_env.backed_var_to_val[symbol])
        size = mode.shape_env.create_symintnode(symbol, hint=hint)
        with mode:
            tensor = torch.empty(size * 2, 3)
        assert symbols.plain_symbol(size) == symbol
        assert symbols.plain_symbol(size * 2) is symbols.plain_symbol(5) is None
        assert symbols.symbols_of(tensor) == symbols.symbols_of(size) == [symbol]
        assert symbols.symbol_ranges([tensor, 3])[str(symbol)] == str(mode.shape_env.var_to_range[symbol])
        assert not symbols.free_unbacked_symbols(size)

        own: Any = fake_mode.fresh_mode()
        other: Any = fake_mode.fresh_mode()
        fresh = symbols.fresh_symbol(own, symbol, mode.shape_env, 0)
        twice: Any = symbols.symbolic_number(own, size * 2, {symbol: fresh})
        assert twice.node.expr == 2 * fresh
        assert bool(twice > 8)  # the range of tall's rows does not answer that
        (guard,) = symbol_guards.guards_of(own)
        assert symbol_guards.guard_all([guard], {fresh: symbol}, mode.shape_env)
        assert str(mode.shape_env.guards[-1].expr) in (f"{symbol} > 4", f"2*{symbol} > 8")
        assert symbol_guards.guard_all([], {}, None)
        with other:
            unbacked = other.shape_env.create_unbacked_symint()
            assert symbols.free_unbacked_symbols(unbacked)
            copy = symbols.fresh_symbol(own, unbacked.node.expr, other.shape_env, 1)
            assert symbols.free_unbacked_symbols(
                symbols.symbolic_number(own, unbacked, {unbacked.node.expr: copy})
            )
        return True

    assert asked_in_backend(questions, tall, torch.ones(5, 7))


def test_a_symbol_that_may_be_one_is_unknown_and_others_have_an_example():
    mode, made, (x,) = fakes(("a", "b", 8), a=(1, 64, 5), b=(2, None, 7))
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(made["a"] == 1)
    names = {value.node.expr: name for name, value in made.items()}
    assert set(symbols_of(x)) == set(names)
    assert [str(one) for one in conditions_of(mode, {})] == []
    assert declared_range(made["a"].node.expr, mode, {}) == (1, 64, None)
    assert bool(made["b"] == 7)  # by a guard


def test_the_range_that_torch_export_was_told_counts():
    rows = Dim("rows", min=1, max=16)
    program = torch.export.export(nn.ReLU(), (torch.randn(5, 8),), dynamic_shapes=({0: rows},))
    value = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    (symbol,) = symbols_of(value)[:1]
    assert declared_range(symbol, mode_of([value]), program.range_constraints) == (1, 16, 5)


def test_a_size_without_bounds_may_be_nothing():
    mode, made, (x,) = fakes(("rows",), rows=(2, None, 5))
    with mode:
        last = x.chunk(2)[-1].shape[0]  # of whose quotients sympy gives infinite bounds
    assert symbols.size_range(last) == (0, None)
    assert symbols.size_range(made["rows"]) == (2, None)


def test_products_that_are_written_differently_are_one_size():
    mode, made, _ = fakes(size=(2, None, 5))
    size = made["size"]
    assert same_expression((8 * size + 8) * (size + 2), 8 * ((size + 1) * (size + 2)))
    assert not same_expression(size * 8, size * 8 + 1)
    assert not same_expression(size, 5), "its example is no proof"
    assert conditions_of(mode, {}) == []


def test_the_first_size_of_a_fake_is_open():
    mode = strict_mode()
    first, second = (symbols.fake_of_any_length(mode, torch.ones(rows, 4)) for rows in (5, 5))
    assert not isinstance(first.shape[0], int)
    assert str(first.shape[0]) == str(second.shape[0])
    assert first.shape[1] == 4
    assert symbols.fake_of_any_length(mode, torch.ones(1, 4)).shape[0] == 1


def test_a_size_that_grows_as_another_one_does_is_a_multiple_of_it():
    mode, sizes, _ = fakes(rows=(2, 100, 5), columns=(2, 100, 7))
    rows, columns = sizes["rows"], sizes["columns"]
    assert symbols.multiple_of(6 * rows, 2 * rows) == 3.0
    assert symbols.multiple_of(6 * rows, 4) is None
    assert symbols.multiple_of(rows * columns, rows) is None
    assert symbols.multiple_of(12, 8) == 1.5
    assert not environment_of(mode).guards


def test_symbols_in_text():
    assert symbols.SYMBOL.findall("[s0 + 3, u12, z1, x2, as3]") == ["s0", "u12", "z1"]


def test_an_expression_adds_no_guard():
    mode, sizes, _ = fakes(rows=(2, 100, 5))
    rows = sizes["rows"]
    assert str(symbols.expression_of(rows + 1)) == f"{rows} + 1"
    assert symbols.expression_of(7) == 7
    assert not environment_of(mode).guards


def test_a_size_of_an_export_has_the_declared_range():
    dynamic = {"x": {0: Dim("rows", min=2, max=64)}, "n": None}

    class Model(nn.Module):
        def forward(self, x, n):
            return x * n

    exported = torch.export.export(Model(), (torch.ones(4, 3), 7), dynamic_shapes=dynamic)
    (x,) = [node for node in exported.graph.find_nodes(op="placeholder") if node.name == "x"]
    assert symbols.size_range(x.meta["val"].shape[0]) == (2, 64)
    assert symbols.size_range(3) == (3, 3)
