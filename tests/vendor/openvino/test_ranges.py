"""int64 beyond 32 bits, which OpenVINO does not keep: exact, or left to torch and counted, never another number."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlinfer.errors import GraphFallbackError
from tests.vendor.openvino.int_ranges.growing import GROWING, everything, positions
from tests.vendor.openvino.lowering import lowered, same

LARGE = torch.tensor([2**31 - 1, -(2**31), 2_000_000_000, -2_000_000_000, 0, 1, -1, 2**24 + 1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_comparisons_whose_difference_needs_33_bits(dtype: torch.dtype):
    def compared(a: torch.Tensor, b: torch.Tensor):
        return a < b, a <= b, a > b, a >= b, a == b, a != b

    x = LARGE.to(dtype)
    same(compared, x.repeat_interleave(8), x.repeat(8))


@pytest.mark.parametrize("name", GROWING)
def test_what_overflows_in_between_is_left_to_torch(name: str):
    function = GROWING[name]
    small, large = torch.arange(8) - 3, torch.full((8,), 2**30 + 1)
    compiled, report = lowered(function, small)
    assert not report.placed("eager")
    for _ in range(2):
        assert torch.equal(compiled(small)[0], function(small))
    with pytest.raises(GraphFallbackError, match="more than 32 bits"):
        compiled(large)
    compiled, _ = lowered(function, small, fallback="allow")
    assert torch.equal(compiled(large)[0], function(large))
    assert torch.equal(compiled(small)[0], function(small))


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-(2**33), 2**33), min_size=8, max_size=8),
    scale=st.sampled_from([1, 2**10, 2**20]),
)
def test_any_numbers(values: list[int], scale: int):
    x = torch.tensor(values) // scale
    assert all(map(torch.equal, mixed()(x), everything(x)))


def mixed(made: list[Any] = []) -> Any:  # noqa: B006 - compiled once for all examples
    if not made:
        made.append(lowered(everything, torch.arange(8), fallback="allow")[0])
    return made[0]


def test_constants_are_refused_when_they_are_lowered():
    table = torch.tensor([1, 2**40])
    for function in (lambda x: x + 2**40, lambda x: x + table, lambda x: x < 2**40):
        compiled, report = lowered(function, torch.arange(2), fixed=(2,), fallback="allow")
        assert "a 64-bit constant needs more than 32 bits" in str(report.refusals())
        assert torch.equal(compiled(torch.arange(2))[0], function(torch.arange(2)))


def test_weights_are_looked_at_like_inputs():
    class Hashes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor([3, 2**40]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 + self.get_buffer("table")

    model = Hashes()
    compiled = torch.compile(
        model,
        backend="dlinfer",
        options={"engine": "openvino", "fallback": "allow", "small_regions": "engine"},
    )
    x = torch.arange(2)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
        model.get_buffer("table").copy_(torch.tensor([5, 6]))
        assert torch.equal(compiled(x), model(x))
        model.get_buffer("table").fill_(2**31 - 1)
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("value", [3e9, -3e9, float("nan"), float("inf"), 2.0**25])
def test_floats_that_become_integers(value: float):
    x = torch.tensor([1.5, -2.7, 100.0])
    compiled, _ = lowered(lambda a: a.long() + 1, x, fallback="allow")
    assert torch.equal(compiled(x)[0], x.long() + 1)
    x[1] = value
    assert torch.equal(compiled(x)[0], x.long() + 1)
    compiled, _ = lowered(lambda a: a.long() + 1, x)
    with pytest.raises(GraphFallbackError, match="to a 64-bit integer"):
        compiled(x)


def test_small_numbers_stay_in_the_engine_however_large_they_might_be():
    mask, ids = torch.ones(3, 40, dtype=torch.int64), torch.randint(150_000, (3, 40))
    same(
        positions,
        mask,
        ids,
        others=[(torch.ones(5, 600, dtype=torch.int64), torch.randint(150_000, (5, 600)))],
    )
