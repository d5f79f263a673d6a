"""Tests of Ascend. ``checks_*.py`` run in a process of their own, on the simulated NPU (test_simulated.py)."""

import sys

import pytest

from dlinfer.ops.core import fallback
from dlinfer.vendor import discovery


@pytest.fixture(autouse=True)
def _on_the_vendor(request: pytest.FixtureRequest):
    simulation = sys.modules.get("tests.vendor.ascend.simulated_npu.install")
    if simulation is None or not request.path.name.startswith("checks_"):
        yield
        return
    from dlinfer.vendor.ascend import VENDOR, chips
    from tests.vendor.ascend.simulated_npu import graphs

    simulation.install()
    discovery._loaded.setdefault("ascend", VENDOR)
    discovery.use("ascend")
    simulation.calls.clear()
    chips.current.cache_clear()
    fallback.reset()
    yield
    graphs.forget()
    simulation.chip.update(name="Ascend910B2", version=223)
    chips.current.cache_clear()
