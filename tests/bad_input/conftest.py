"""Bad input: one clear error, a process that ends, nothing left behind, and never the end of an engine."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import Lab


@pytest.fixture(scope="session")
def model(lab: Lab) -> Path:
    """One of them. Not to be changed: see ``copy``."""
    return lab.model("llama")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may break."""
    return Path(shutil.copytree(model, tmp_path / "model"))
