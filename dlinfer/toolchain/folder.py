"""The paths of toolchains' environments, and the check that an environment matches its recipe."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlinfer import settings
from dlinfer.errors import ToolchainMissingError
from dlinfer.toolchain.recipe import Toolchain

STAMP = "dlinfer-toolchain.json"
"""The file that ``install`` writes last. An environment without this file is unfinished."""


@dataclass(frozen=True)
class Environment:
    """The paths of an environment, which is a plain venv.

    folder: its root. python: its interpreter. scripts: the folder of its commands. site_packages: its packages.
    """

    folder: Path
    python: Path
    scripts: Path
    site_packages: Path


@dataclass(frozen=True)
class State:
    """Whether an environment is installed. reason: its CPython version if it is installed, else why it is not."""

    installed: bool
    reason: str


def root() -> Path:
    """Return the folder of all environments.

    It is in the user's cache folder, so that all copies of dlinfer share it.
    """
    return settings.cache_folder() / "toolchains"


def folder(toolchain: Toolchain) -> Path:
    return root() / toolchain.name


def environment(toolchain: Toolchain) -> Environment:
    """Return the paths of a recipe's environment, whether it exists or not."""
    place = folder(toolchain)
    packages = place / "lib" / f"python{toolchain.python}" / "site-packages"
    return Environment(place, place / "bin" / "python", place / "bin", packages)


def state(toolchain: Toolchain) -> State:
    """Return whether a recipe's environment is installed. This reads one small file."""
    place = folder(toolchain)
    if not place.exists():
        return State(False, "it is not installed")
    stamp = _stamp(place)
    if stamp is None:
        return State(False, "its installation was not finished")
    if stamp.get("recipe") != toolchain.digest:
        return State(False, "another version of dlinfer installed it, by another recipe")
    if not environment(toolchain).python.exists():
        return State(False, f"its CPython no longer exists: {stamp.get('interpreter')}")
    return State(True, f"CPython {stamp.get('version')}")


def find(toolchain: Toolchain) -> Environment:
    """Return a recipe's environment. Raises ToolchainMissingError if it is not installed."""
    current = state(toolchain)
    if not current.installed:
        raise ToolchainMissingError(
            toolchain=toolchain.name, reason=current.reason, folder=str(folder(toolchain))
        )
    return environment(toolchain)


def _stamp(place: Path) -> dict[str, Any] | None:
    try:
        stamp = json.loads((place / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None
