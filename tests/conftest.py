"""Fixtures that several folders of tests share."""

import importlib
import sys
from pathlib import Path

import pytest

from dlinfer.vendor import discovery
from tests.plugins.builder import write_plugin


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
