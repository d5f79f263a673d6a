"""Tests of the engine openvino run where the package is installed; elsewhere each file is skipped, and says so."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.graph.conftest import artifact_folder, graph_mode

__all__ = ["artifact_folder", "graph_mode"]


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip("the extra dlinfer[openvino] is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Called for each file of this folder, before it is imported."""
    needs = module_path.name not in ("test_vendor.py", "test_kernels.py")
    return _Skipped.from_parent(parent, path=module_path) if needs and find_spec("openvino") is None else None
