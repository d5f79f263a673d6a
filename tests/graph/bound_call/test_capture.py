"""Calls without guards: what they may assume, and what makes them refuse to be made."""

from dataclasses import dataclass

import pytest
import torch

from dlinfer.errors import ArtifactInputError, CaptureError
from dlinfer.graph.bound_call.capture import capture_call
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private.dynamo import mark_fixed, mark_unbacked

pytestmark = pytest.mark.usefixtures("graph_mode")


def halves_for_long_tables(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x / 2 + table.sum() if table.shape[0] > 3 else x * 3


def captured(function, steady=(), **kwargs):
    return capture_call(function, kwargs, steady=steady, options=CompileOptions())


def test_an_assumption_on_a_size_that_may_change_is_refused():
    with pytest.raises(
        CaptureError, match=r"only while table.size\(\)\[0\] > 3, but table\.size\(\)\[0\] may change"
    ):
        captured(halves_for_long_tables, x=torch.ones(2, 9), table=torch.ones(5))


def test_an_assumption_on_a_steady_argument_is_asked_of_each_new_one():
    x, table = torch.ones(2, 9), torch.ones(5)
    call, result = captured(halves_for_long_tables, steady=["table"], x=x, table=table)
    assert torch.equal(result, halves_for_long_tables(x, table))
    for given in (x * 4, x[:, :3]):
        assert torch.equal(call(x=given, table=table), halves_for_long_tables(given, table))
    longer = torch.ones(7)
    assert torch.equal(call(x=x, table=longer), halves_for_long_tables(x, longer))
    with pytest.raises(ArtifactInputError, match=r"table\.size\(\)\[0\] > 3, given 2"):
        call(x=x, table=torch.ones(2))


def test_sizes_that_were_equal_by_chance_must_stay_equal():
    def added(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x * 2 + table[0]

    x, table = torch.ones(5, 9), torch.ones(5)
    with pytest.raises(CaptureError, match=r"only while x\.size\(\)\[0\] == table\.size\(\)\[0\]"):
        captured(added, x=x, table=table)
    mark_unbacked(x, 0, "rows")
    call, _ = captured(added, steady=["table"], x=x, table=table)
    for rows in (1, 2, 7):
        assert torch.equal(call(x=torch.ones(rows, 9), table=table), added(torch.ones(rows, 9), table))


@pytest.mark.parametrize(
    ("sizes", "taken"), [((2, 0, 1), False), ((0, 3), False), ((2, 3, 1), True), ((1, 1), True)]
)
def test_an_example_without_elements_is_refused(sizes, taken):
    """The strides of such a tensor are 1, whatever those of later ones are."""

    def added(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + x.sum(0)

    x = torch.ones(sizes)
    for dim in range(x.dim()):
        mark_unbacked(x, dim, f"size {dim}")
    if not taken:
        with pytest.raises(CaptureError, match="x has no elements in this call"):
            captured(added, x=x)
        return
    call, _ = captured(added, x=x)
    later = torch.randn((4, 3, 5)[: x.dim()])
    torch.testing.assert_close(call(x=later), added(later))


def test_sizes_that_are_not_equal_in_the_captured_call_are_refused():
    x, y = torch.ones(0, 3), torch.ones(1, 3)
    mark_unbacked(x, 0, "rows")
    mark_unbacked(y, 0, "others")
    with pytest.raises(
        CaptureError, match=r"only while .*y\.size\(\)\[0\].*, but this call violates this condition"
    ):
        captured(lambda x, y: x + y, x=x, y=y)


def test_a_number_in_a_changing_argument_may_be_steady():
    @dataclass
    class Meta:
        width: int
        shift: torch.Tensor

    def cut(x: torch.Tensor, meta: Meta) -> torch.Tensor:
        return x.view(-1, meta.width) + meta.shift

    x = torch.arange(12.0)
    with pytest.raises(CaptureError, match=r"meta\.width may change"):
        captured(cut, x=x, meta=Meta(4, torch.ones(1)))
    call, _ = captured(cut, steady=["x", "meta.width"], x=x, meta=Meta(4, torch.ones(1)))
    assert torch.equal(call(x=x, meta=Meta(4, torch.ones(1) * 3)), x.view(3, 4) + 3)
    other = torch.arange(8.0)
    assert torch.equal(call(x=other[:12], meta=Meta(4, torch.ones(1))), other.view(2, 4) + 1)


def test_autocast_that_differs_from_the_capture_is_refused():
    x = torch.ones(2, 9)
    mark_fixed(x, 1)
    call, _ = captured(Applied(), x=x)
    with torch.no_grad():
        plain = call(x=x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pytest.raises(ArtifactInputError, match="autocast"):
                call(x=x)
            casting, result = captured(Applied(), x=x)
            assert result.dtype is torch.bfloat16
            assert torch.equal(casting(x=x), Applied()(x))
        with pytest.raises(ArtifactInputError, match="autocast off"):
            casting(x=x)
        assert torch.equal(call(x=x), plain)


def test_a_failed_report_neither_stops_the_capture_nor_hides_a_write(monkeypatch):
    def fails(value):
        raise RuntimeError("no description")

    def counted(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        return x * 2 + seen

    monkeypatch.setattr("dlinfer.graph.observe.describe", fails)
    x, seen = torch.ones(3), torch.zeros(3)
    mark_fixed(x, 0)
    mark_fixed(seen, 0)
    with pytest.warns(RuntimeWarning, match="report of a graph is incomplete.*no description"):
        _, result = captured(counted, steady=["seen"], x=x, seen=seen)
    assert torch.equal(result, x * 3)
    with (
        pytest.warns(RuntimeWarning, match="report of a graph is incomplete"),
        pytest.raises(CaptureError, match="it writes into seen, which may be another tensor"),
    ):
        captured(counted, x=x, seen=seen)


class Applied(torch.nn.Module):
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((9, 9), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * 2
