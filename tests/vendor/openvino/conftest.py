"""Tests of the engine openvino, which need the package of that name; the extra ``dev`` installs it."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.known_answers.suite import is_fault
from dlinfer.vendor.openvino import VENDOR
from tests.graph.conftest import artifact_folder, graph_mode

__all__ = ["artifact_folder", "graph_mode"]


def _skip_known_faults() -> Generator[None, Any, Any]:
    """A test of what OpenVINO computes wrongly on the CPU at hand has nothing to compare: torch computes it there."""
    try:
        return (yield)
    except GraphFallbackError as refused:
        reason = str(refused.fields["reason"])
        if is_fault(reason):
            pytest.skip(reason)
        if "bad combination" in reason and os.environ.get("ONEDNN_MAX_CPU_ISA") == "SSE41":
            pytest.skip(
                "OpenVINO without AVX on this CPU gets no kernel for TopK and what is sorted: bad combination"
            )
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Of fixtures."""
    return (yield from _skip_known_faults())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """Of tests."""
    return (yield from _skip_known_faults())


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip(VENDOR.probe().reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Called for each file of this folder, before it is imported."""
    return None if VENDOR.probe().available else _Skipped.from_parent(parent, path=module_path)
