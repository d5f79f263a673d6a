"""Intervals of whole numbers: no number leaves what an engine keeps unseen, and small ones are never refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from dlinfer.graph.capture.trace import trace
from dlinfer.vendor.openvino.int_ranges.kept import Kept, range_of
from dlinfer.vendor.openvino.int_ranges.ranges import Ranges
from tests.graph.symbols import symbolic
from tests.vendor.openvino.int_ranges.growing import GROWING, everything, positions


def kept(bits: int = 32) -> Kept:
    return Kept("the engine", bits, cast=2**24)


def captured(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The function in the dialect, for every size."""
    fakes = symbolic(*args)
    mode = next(one.fake_mode for one in fakes if isinstance(one, FakeTensor))
    return trace(lambda *given: tuple(pytree.tree_leaves(function(*given))), fakes, mode).graph_module


def asked(ranges: Ranges, *inputs: Any) -> str | None:
    return ranges(inputs, {index: range_of(inputs[index]) for index in ranges.inputs})


@pytest.mark.parametrize("name", GROWING)
def test_what_overflows_in_between_is_told_by_the_numbers_of_a_call(name: str):
    small, large = torch.arange(8) - 3, torch.full((8,), 2**30 + 1)
    ranges = Ranges(captured(GROWING[name], small).graph, kept())
    for _ in range(2):
        assert asked(ranges, small) is None
        reason = asked(ranges, large)
        assert reason is not None
        assert "more than 32 bits, which the engine does not keep" in reason


def test_fewer_bits_are_kept_of_narrower_dtypes_too_and_what_is_as_narrow_wraps_around():
    x = torch.full((8,), 100)
    for dtype, cut in ((torch.int64, True), (torch.int32, True), (torch.int16, False), (torch.int8, False)):
        ranges = Ranges(captured(lambda x: x * x * x, x.to(dtype)).graph, kept(16))
        assert (asked(ranges, x.to(dtype)) is not None) is cut


def test_sizes_are_whole_numbers_too():
    ranges = Ranges(captured(lambda x: x + x.shape[0] * x.shape[0], torch.arange(5)).graph, kept(8))
    assert asked(ranges, torch.zeros(8, dtype=torch.int64)) is None
    assert asked(ranges, torch.zeros(12, dtype=torch.int64)) is not None


def test_a_float_becomes_a_number_that_the_engine_casts():
    x = torch.randn(4)
    assert asked(Ranges(captured(lambda x: x.long() + 1, x).graph, kept()), x) is None
    assert asked(Ranges(captured(lambda x: x.long() * 300, x).graph, kept()), x) is not None


class Recording(fx.Interpreter):
    """Runs a graph and records every tensor of int64."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.found += [one for one in pytree.tree_leaves(value) if getattr(one, "dtype", None) is torch.int64]
        return value


MODULE = captured(everything, torch.arange(8))
RANGES = Ranges(MODULE.graph, kept(16))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=8, max_size=8),
    scale=st.sampled_from([1, 2**5, 2**10]),
)
def test_what_is_not_told_of_stays_within_the_bits(values: list[int], scale: int):
    x = torch.tensor(values) // scale
    if asked(RANGES, x) is None:
        recording = Recording(MODULE)
        recording.run(x)
        assert all(kept(16).holds(range_of(one)) for one in recording.found)


def test_small_numbers_stay_in_the_engine_however_large_they_might_be():
    mask, ids = torch.ones(3, 40, dtype=torch.int64), torch.randint(150_000, (3, 40))
    ranges = Ranges(captured(positions, mask, ids).graph, kept())
    assert asked(ranges, mask, ids) is None
    assert asked(ranges, torch.ones(5, 600, dtype=torch.int64), torch.randint(150_000, (5, 600))) is None


def test_ranges_of_tensors():
    assert range_of(torch.tensor([3, -2, 9])) == (-2, 9)
    assert range_of(torch.tensor([True, True])) == (0, 1)
    assert range_of(torch.empty(0, dtype=torch.int64)) == (0, 0)
