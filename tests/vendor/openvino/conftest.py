"""Tests of the engine openvino, which need the package of that name; the extra ``dev`` installs it."""

from importlib import util
from pathlib import Path

import pytest

from tests.graph.conftest import artifact_folder, graph_mode

__all__ = ["artifact_folder", "graph_mode"]


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip("the package openvino is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Called for each file of this folder, before it is imported."""
    installed = util.find_spec("openvino") is not None
    return None if installed else _Skipped.from_parent(parent, path=module_path)
