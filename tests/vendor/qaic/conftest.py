"""Models, and the stand-in for Qualcomm's SDK: see the folder ``stand_in``. No test of this folder sees a card."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'dlinfer[qaic]'")
pytest.importorskip("onnx", reason="needs onnx: pip install 'dlinfer[qaic]'")
pytest.importorskip("yaml", reason="needs pyyaml: pip install 'dlinfer[qaic]'")

from dlinfer import settings
from dlinfer.vendor.qaic import sdk
from tests.vendor.qaic import models

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    """The model ``linear`` with a symbolic batch."""
    return models.linear(tmp_path / "linear.onnx")


@pytest.fixture
def quiet() -> Iterator[None]:
    """Options without effect are taken in silence, as the policy ``allow`` says."""
    with settings.override(fallback="allow"):
        yield


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in compiler on PATH."""
    folder = tmp_path / "stand-in-bin"
    folder.mkdir()
    script = folder / "qaic-exec"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN / "compiler.py"}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return script


@pytest.fixture
def stand_in(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in for the package ``qaic``, with the stand-in compiler."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    module = sdk.package()
    yield module
    sys.modules.pop("qaic", None)


@pytest.fixture
def without_sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Qualcomm's SDK, whatever this one has."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sdk, "EXEC", tmp_path / "no-sdk")
    monkeypatch.setitem(sys.modules, "qaic", None)
