"""What all tests share: the same random numbers in every run, and fixtures of several folders."""

import importlib
import random
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from dlinfer.vendor import discovery
from tests.plugins.builder import write_plugin

# The same examples in every run, and as much time as a busy machine needs to draw them.
hypothesis.settings.register_profile(
    "calm", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("calm")


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """What a module draws as it is imported depends on no other module."""
    if isinstance(collector, pytest.Module):
        _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test and its fixtures draw depends on no other test, and so not on which worker ran which files before."""
    _seed()


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``plugins(name, source)`` installs a vendor; discovery starts empty and drives no dispatcher."""
    for state, empty in {"_loaded": {}, "_active": {}, "_listeners": []}.items():
        monkeypatch.setattr(discovery, state, empty)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(name: str, source: str, distribution: str = "") -> None:
        write_plugin(tmp_path, name, source, distribution)
        importlib.invalidate_caches()

    yield install
    for name in set(sys.modules) - before:
        if name.endswith("_plugin"):
            del sys.modules[name]
