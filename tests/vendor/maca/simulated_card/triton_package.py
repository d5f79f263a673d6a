"""A folder with Triton beside every environment, whose interpreter runs our kernels on the host: ``make triton``.

It is not installed into the project's environment: torch and LMDeploy behave otherwise where Triton is.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from dlinfer import settings

VERSION = "3.9.0"
_STAMP = "made"


def folder() -> Path:
    """Where it lies, or will. Its libraries are for one CPython."""
    return settings.cache_folder() / "toolchains" / f"triton-{VERSION}-{sys.implementation.cache_tag}"


def missing() -> str:
    """Why it cannot be used here; empty where it can."""
    if importlib.util.find_spec("triton") is not None or (folder() / _STAMP).exists():
        return ""
    return f"triton {VERSION} is not at {folder()}: make triton"


def make() -> Path:
    """Download the package (290 MB of PyPI, 1 GB on disk); does nothing where it is there."""
    place = folder()
    if (place / _STAMP).exists():
        return place
    shutil.rmtree(place, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", str(place), f"triton=={VERSION}"], check=True)
    (place / _STAMP).touch()
    return place


if __name__ == "__main__":
    print(make())
