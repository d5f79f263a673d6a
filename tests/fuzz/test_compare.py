"""Which differences count, shown by programs whose compiled form is spoiled by hand."""

from collections.abc import Callable, Mapping

import pytest
import torch

from tests.fuzz import execute
from tests.fuzz.budget import Budget
from tests.fuzz.check import eagerly
from tests.fuzz.compare import Difference, differences
from tests.fuzz.program import Call, Input, Program, Step

X = Input("x", "argument", "float32", ("A", 4), "guarded", "normal")
SIN = Step("v", "torch.sin({0})", ("x",), rounds=True)
SUM = Step("w", "({0} * 1000).sum()", ("v",), rounds=True)
WRITE = Step("", "{0}.add_(1)", ("x",), rounds=True, features=("write",))
PLAIN = Program(1, (X,), (SIN, SUM), ("v", "w"), (Call({"A": 3}), Call({"A": 5})))

Tensors = tuple[torch.Tensor, ...]


def found(
    program: Program, spoil: Callable[[Mapping[str, torch.Tensor], execute.Forward], Tensors]
) -> list[Difference]:
    """What is said of the program when ``spoil(arguments, forward)`` runs in its place."""
    model, kept = execute.module(program)
    forward = execute.plain(model)
    given = execute.calls(program, lambda arguments: spoil(arguments, forward), kept)
    return differences(eagerly(program), given, Budget(program))


def kinds(
    program: Program, spoil: Callable[[Mapping[str, torch.Tensor], execute.Forward], Tensors]
) -> set[str]:
    return {difference.kind for difference in found(program, spoil)}


def test_equal_programs_differ_in_nothing():
    assert not found(PLAIN, lambda arguments, forward: forward(arguments))


def test_rounding_is_no_difference():
    def in_float64(arguments: Mapping[str, torch.Tensor], _: execute.Forward) -> Tensors:
        wide = arguments["x"].double().sin()
        return wide.float(), (wide * 1000).sum().float()

    assert not found(PLAIN, in_float64)


UNDERFLOW = Program(
    1,
    (Input("x", "argument", "float16", (3,), "plain", "normal"),),
    (
        Step("small", "{0} * 0 - 1e-4", ("x",), rounds=True),
        Step("power", "torch.square({0}) ** {0}", ("small",), rounds=True),
        Step("wide", "{0}.to(torch.float32)", ("power",), rounds=True),
    ),
    ("wide",),
    (Call({}),),
)


def test_where_float64_alone_is_finite_roundings_are_those_of_the_coarsest_dtype():
    right = (1e-8) ** -1e-4
    assert not found(UNDERFLOW, lambda arguments, _: (torch.full((3,), right * 1.001),))
    assert not found(UNDERFLOW, lambda arguments, _: (torch.full((3,), torch.inf),))
    assert found(UNDERFLOW, lambda arguments, _: (torch.full((3,), right * 1.02),))


def test_an_element_that_is_off_by_more_than_rounding():
    def spoiled(arguments: Mapping[str, torch.Tensor], forward: execute.Forward) -> Tensors:
        v, w = forward(arguments)
        v[1, 2] += 1e-5
        return v, w

    (difference,) = found(PLAIN, spoiled)
    assert (difference.kind, difference.call, difference.what) == ("value", 0, "result 0")
    assert "at [1, 2], 1 of 12 elements" in difference.detail


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stands_where_eager_has_it(value: float):
    def spoiled(arguments: Mapping[str, torch.Tensor], forward: execute.Forward) -> Tensors:
        v, w = forward(arguments)
        return v, w.fill_(value)

    assert kinds(PLAIN, spoiled) == {"value"}


def test_whole_numbers_are_exact():
    program = Program(
        1, (Input("i", "argument", "int64", (4,)),), (Step("v", "{0} * 3", ("i",)),), ("v",), (Call(),)
    )
    assert kinds(program, lambda arguments, forward: (forward(arguments)[0] + 1,)) == {"value"}


def test_a_write_that_is_missing():
    program = Program(1, (X,), (WRITE, SIN), ("v",), (Call({"A": 3}),))
    missing = lambda arguments, forward: forward({"x": arguments["x"].clone()})  # noqa: E731
    assert kinds(program, missing) == {"memory", "version"}


def test_memory_around_an_argument_is_nobody_elses():
    def spoiled(arguments: Mapping[str, torch.Tensor], forward: execute.Forward) -> Tensors:
        arguments["x"].as_strided((1,), (1,), 0).fill_(1)
        return forward(arguments)

    assert kinds(PLAIN, spoiled) == {"memory"}


def test_memory_around_an_argument_when_both_raise():
    program = Program(1, (X,), (Step("v", "{0}[99]", ("x",)),), ("v",), (Call({"A": 3}),))

    def spoiled(arguments: Mapping[str, torch.Tensor], forward: execute.Forward) -> Tensors:
        arguments["x"].as_strided((1,), (1,), 0).fill_(1)
        raise ValueError

    assert kinds(program, spoiled) == {"guard"}
    assert not found(program, lambda arguments, forward: forward(arguments))
    assert kinds(program, lambda arguments, _: (arguments["x"][0],)) == {"no error"}


def test_only_the_compiled_one_raises():
    def spoiled(arguments: Mapping[str, torch.Tensor], forward: execute.Forward) -> Tensors:
        raise KeyError("why")

    (difference,) = found(PLAIN, spoiled)
    assert (difference.kind, difference.what, difference.detail) == ("error", "KeyError", "'why'")


def test_a_result_that_shares_memory_or_does_not():
    program = Program(1, (X,), (Step("v", "{0}.t()", ("x",)),), ("v",), (Call({"A": 3}),))
    copied = lambda arguments, forward: (forward(arguments)[0].t().clone().t(),)  # noqa: E731
    assert kinds(program, copied) == {"alias"}


def test_results_of_earlier_calls_stay_as_they_are():
    kept: list[torch.Tensor] = []

    def reusing(arguments: Mapping[str, torch.Tensor], forward: execute.Forward) -> Tensors:
        made = forward(arguments)
        if not kept:
            kept.extend(made)
        kept[1].copy_(made[1])
        return made

    (difference,) = found(PLAIN, reusing)
    assert (difference.call, difference.what) == (1, "result 1")


def test_dtypes_shapes_and_strides():
    assert kinds(PLAIN, lambda a, forward: (forward(a)[0].double(), forward(a)[1])) == {"dtype"}
    assert kinds(PLAIN, lambda a, forward: (forward(a)[0][:, :2], forward(a)[1])) == {"shape"}
    assert kinds(PLAIN, lambda a, forward: (forward(a)[0].t().contiguous().t(), forward(a)[1])) == {"stride"}
