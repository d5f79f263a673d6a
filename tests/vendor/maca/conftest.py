"""Tests of MetaX cards. ``checks_*.py`` run in a process of their own, on the simulated card (test_simulated.py)."""

import sys

import pytest

from dlinfer.ops.core import fallback
from dlinfer.vendor import discovery


@pytest.fixture(autouse=True)
def _on_the_vendor(request: pytest.FixtureRequest):
    simulation = sys.modules.get("tests.vendor.maca.simulated_card.install")
    if simulation is None or not request.path.name.startswith("checks_"):
        yield
        return
    from dlinfer.vendor import maca
    from tests.vendor.maca.simulated_card import calling

    discovery._loaded.setdefault("maca", maca.VENDOR)
    discovery.use("maca")
    calling.calls.clear()
    fallback.reset()
    yield
