"""Twins: fakes of their own symbols, and what compiling them assumed, asked of the model's symbols."""

from typing import Any

import pytest
import torch

from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.torch_private import fake_mode
from dlinfer.vendor.cpu.inductor.twins import twins_of
from tests.graph.passes.fusion.capturing import captured

pytestmark = pytest.mark.usefixtures("graph_mode")


def fakes(function, *args) -> list:
    graph = captured(function, *args).graph_module.graph
    return [fake(node) for node in graph.find_nodes(op="placeholder")]


def tensors(values) -> list[Any]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def test_twins_have_the_sizes_strides_and_dtypes_over_fresh_symbols():
    given = fakes(
        lambda x, y: x.t() @ y, torch.ones(4, 6).t().contiguous().t(), torch.ones(4, 6, dtype=torch.float32)
    )
    twins = twins_of(given)
    assert len(twins.values) == len(given)
    for twin, original in zip(tensors(twins.values), tensors(given), strict=True):
        assert twin.dtype == original.dtype
        assert twin.fake_mode is twins.mode is not original.fake_mode
        back = {str(fresh): str(symbol) for fresh, symbol in twins.original.items()}

        def renamed(number, back=back):
            return "*".join(sorted(back.get(part, part) for part in str(number).split("*")))

        assert [renamed(n) for n in (*twin.shape, *twin.stride())] == [
            "*".join(sorted(str(n).split("*"))) for n in (*original.shape, *original.stride())
        ]


def test_equal_symbols_stay_equal_and_others_apart():
    one, other = tensors(
        twins_of(fakes(lambda x, y: x + y[:, :1], torch.ones(4, 6), torch.ones(4, 5))).values
    )
    assert str(one.shape[0]) == str(other.shape[0])
    assert str(one.shape[1]) != str(other.shape[1])


def test_plain_numbers_and_sizes_stay():
    (twin,) = tensors(twins_of([*fakes(lambda x: x * 2, torch.ones(3, 4)), 5]).values)
    assert twins_of([5, 2.0, True]).values == [5, 2.0, True]
    assert twin.dim() == 2


@pytest.mark.parametrize("lower", [-3, 0, 1, 2])
def test_ints_of_any_sign(lower):
    (twin,) = twins_of([_symbol_of(fake_mode.fresh_mode(), lower + 5, lower)]).values
    assert isinstance(twin, torch.SymInt)
    assert int(twin.node.hint) == lower + 5


def _symbol_of(mode, hint, lower):
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env = mode.shape_env
    symbol = env.create_symbol(
        hint, LocalSource("k"), DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
    )
    env.constrain_symbol_range(symbol, lower, 100)
    return env.create_symintnode(symbol, hint=hint)


def test_assumptions_are_asked_of_the_models_symbols():
    given = fakes(lambda x: x * 2, torch.ones(4, 6))
    twins = twins_of(given)
    assert twins.assumptions() == []
    (twin,) = tensors(twins.values)
    assert bool(twin.shape[0] * 2 > 5)
    assumptions = twins.assumptions()
    assert len(assumptions) == 1
    environment = tensors(given)[0].fake_mode.shape_env
    before = len(environment.guards)
    assert twins.holds(assumptions)
    assert len(environment.guards) == before + 1, "it is guarded from now on"


def test_assumptions_that_do_not_hold_for_another_model():
    twins = twins_of(fakes(lambda x: x * 2, torch.ones(8, 6)))
    (twin,) = tensors(twins.values)
    assert bool(twin.shape[0] > 7)
    other = twins_of(fakes(lambda x: x * 2, torch.ones(4, 6)))
    assert not other.holds(twins.assumptions())
