"""tp=2 on simulated Ascend: LMDeploy's processes, joined by gloo behind the name of hccl, on a device each."""

import pytest

from examples.tiny_models.families import FAMILIES
from tests.e2e.devices import cells
from tests.e2e.devices.table import DEVICES
from tests.e2e.harness import Lab


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(one, marks=pytest.mark.full) for one in FAMILIES if one != "llama")]
)
def test_two_ranks_give_the_tokens_of_one(family: str, lab: Lab) -> None:
    """Which are transformers', as those of one rank are (test_devices.py)."""
    cell = cells.DeviceCell(DEVICES["ascend"], family, "eager", "chunked")
    run, hf = cells.ask(lab, cell, tp=2)
    assert cells.check_tokens(run, hf) == []
    assert run["ranks"] == 2
