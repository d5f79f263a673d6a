"""Tests of the engine openvino, which need the package of that name; the extra ``dev`` installs it."""

from importlib import util
from pathlib import Path

import pytest

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.known_answers.suite import is_fault
from tests.graph.conftest import artifact_folder, graph_mode

__all__ = ["artifact_folder", "graph_mode"]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """A test of what OpenVINO computes wrongly on the CPU at hand has nothing to compare: torch computes it there."""
    try:
        return (yield)
    except GraphFallbackError as refused:
        if is_fault(str(refused.fields["reason"])):
            pytest.skip(str(refused.fields["reason"]))
        raise


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip("the package openvino is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Called for each file of this folder, before it is imported."""
    installed = util.find_spec("openvino") is not None
    return None if installed else _Skipped.from_parent(parent, path=module_path)
