"""Tests of the engine openvino, which need the package of that name; the extra ``dev`` installs it."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.selftest.suite import WrongResult
from dlinfer.vendor.openvino import VENDOR
from tests.graph.conftest import artifact_folder, graph_mode

__all__ = ["artifact_folder", "graph_mode"]


_UNDER_A_FORCED_LEVEL = (
    (("SSE41",), "bad combination", "no kernel for TopK and what is sorted"),
    # OpenVINO asks the CPU for bfloat16, and oneDNN the level.
    (("AVX512_CORE", "AVX512_CORE_VNNI"), "brgemm bf16 kernel could only", "no attention in bfloat16"),
)
"""(levels, what OpenVINO says, what it lacks) where its answer does not stand for a CPU of that level."""


def _skip_known_faults() -> Generator[None, Any, Any]:
    """A test of what OpenVINO computes wrongly on the CPU at hand has nothing to compare: torch computes it there."""
    try:
        return (yield)
    except GraphFallbackError as refused:
        reason: str = refused.fields["reason"]
        if isinstance(reason, WrongResult):  # str() would make a plain string of it
            pytest.skip(reason)
        level = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
        for levels, said, skipped in _UNDER_A_FORCED_LEVEL:
            if said in reason and level in levels:
                pytest.skip(f"OpenVINO under {level} on this CPU gets {skipped}: {said}")
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
