"""A place that the data tells is looked at before a view of it is made."""

from typing import cast

import pytest
import torch

import dlinfer
from dlinfer.errors import GraphRunError
from tests.torch_releases import since_2_13

ENGINES = ("inductor", "openvino", "onnxruntime")


class Row(torch.nn.Module):
    def forward(self, table: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return table[row] * 2 + table[row]


@since_2_13("cannot trace a row whose number is in a tensor")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_outside_raises_in_place_of_reading_what_lies_there(engine: str):
    pytest.importorskip(engine if engine != "inductor" else "torch", reason=f"{engine} is not installed")
    model = Row().eval()
    options = {"fallback": "allow", "small_regions": "engine"}
    rows = torch.export.Dim("rows", min=2, max=100)
    run = dlinfer.compile(
        model,
        (torch.randn(5, 4), torch.tensor(1)),
        dynamic_shapes=({0: rows}, {}),
        engine=engine,
        options=options,
    )
    for number in (3, 9):
        table = torch.randn(number, 4)
        for row in (0, number - 1, -1, -number):
            torch.testing.assert_close(run(table, torch.tensor(row)), model(table, torch.tensor(row)))
        for row in (number, -number - 1, 2**40):
            with pytest.raises(GraphRunError, match="out of"):
                run(table, torch.tensor(row))


class Replaced(torch.nn.Module):
    def forward(self, table: torch.Tensor, values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.select_scatter(table, values, 0, cast(int, row.item()))


def test_a_row_outside_is_not_written():
    given = (torch.zeros(4, 3), torch.ones(3))
    run = dlinfer.compile(Replaced(), (*given, torch.tensor(2)), engine="inductor")
    for row in (0, 3):
        torch.testing.assert_close(run(*given, torch.tensor(row)), Replaced()(*given, torch.tensor(row)))
    with pytest.raises(GraphRunError, match="out of"):
        run(*given, torch.tensor(9))
