"""Indexing by a tensor without dimensions: its number is read at each call, and not kept from the first."""

from typing import Any

import pytest
import torch

from tests.torch_releases import since_2_13

OPTIONS: dict[str, Any] = {"engine": "inductor", "fallback": "allow"}


@since_2_13("cannot trace a row whose number is in a tensor")
@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_the_index_may_change(rows: int):
    def picked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index] * 2

    run = torch.compile(picked, backend="dlinfer", options=OPTIONS)
    x = torch.arange(rows) + 5
    for place in (0, rows - 1, -1):
        assert torch.equal(run(x, torch.tensor(place)), picked(x, torch.tensor(place)))
    with pytest.raises(IndexError):
        run(x, torch.tensor(rows))
