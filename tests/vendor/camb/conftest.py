"""Tests of camb. ``checks_*.py`` run in a process of their own, on the simulated MLU (test_simulated.py)."""

import sys

import pytest

from dlinfer.ops.core import fallback
from dlinfer.vendor import discovery


@pytest.fixture(autouse=True)
def _on_the_vendor(request: pytest.FixtureRequest):
    simulation = sys.modules.get("tests.vendor.camb.simulated_mlu.install")
    if simulation is None or not request.path.name.startswith("checks_"):
        return
    from dlinfer.vendor.camb import VENDOR

    simulation.install()
    discovery._loaded.setdefault("camb", VENDOR)
    discovery.use("camb")
    simulation.calls.clear()
    fallback.reset()
