"""These tests need LMDeploy itself; where it is absent they say so."""

from importlib.metadata import entry_points
from typing import Any

import pytest

pytest.importorskip("lmdeploy", reason="LMDeploy is not installed (make setup installs it)")


@pytest.fixture
def no_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where dlinfer has no vendor of its own for LMDeploy's devices maca and camb."""
    from dlinfer.vendor import discovery

    def others(**asked: str) -> list:
        found: Any = entry_points(**asked)
        return [
            one
            for one in found
            if one.value not in ("dlinfer.vendor.maca:VENDOR", "dlinfer.vendor.camb:VENDOR")
        ]

    monkeypatch.setattr(discovery, "entry_points", others)
