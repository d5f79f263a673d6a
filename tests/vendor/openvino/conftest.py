"""Tests of the engine openvino, which is in the making: they run once its vendor is registered, and say so now."""

from pathlib import Path

import pytest

from dlinfer.vendor import discovery
from tests.graph.conftest import artifact_folder, graph_mode

__all__ = ["artifact_folder", "graph_mode"]


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip(
            "the engine openvino is in the making: no vendor is registered for it", allow_module_level=True
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Called for each file of this folder, before it is imported."""
    registered = "openvino" in discovery.names()
    return None if registered else _Skipped.from_parent(parent, path=module_path)
