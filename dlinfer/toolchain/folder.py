"""Where environments lie, and whether one is what its recipe says."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlinfer import settings
from dlinfer.errors import ToolchainMissingError
from dlinfer.toolchain.recipe import Toolchain

STAMP = "dlinfer-toolchain.json"
"""Written last, so that an environment without it is half an environment."""


@dataclass(frozen=True)
class Environment:
    """A finished environment; it is a plain venv.

    folder: its root. python: its interpreter. scripts: the folder of its commands. site_packages: its packages.
    """

    folder: Path
    python: Path
    scripts: Path
    site_packages: Path


@dataclass(frozen=True)
class State:
    """installed: whether it is there and made by this recipe; else ``reason`` says what is there."""

    installed: bool
    reason: str


def root() -> Path:
    """Return the folder of all environments, in the user's cache folder, so that all clones share them."""
    return settings.cache_folder() / "toolchains"


def folder(toolchain: Toolchain) -> Path:
    """Where this one's environment lies, or will."""
    return root() / toolchain.name


def environment(toolchain: Toolchain) -> Environment:
    """Return the paths of an environment, whether it is there or not."""
    place = folder(toolchain)
    packages = place / "lib" / f"python{toolchain.python}" / "site-packages"
    return Environment(place, place / "bin" / "python", place / "bin", packages)


def state(toolchain: Toolchain) -> State:
    """Return whether an environment is installed; reads one small file."""
    place = folder(toolchain)
    if not place.exists():
        return State(False, "it is not installed")
    stamp = _stamp(place)
    if stamp is None:
        return State(False, "its installation was not finished")
    if stamp.get("recipe") != toolchain.digest:
        return State(False, "it was made by another recipe (another version of dlinfer)")
    if not environment(toolchain).python.exists():
        return State(False, f"its CPython is gone ({stamp.get('interpreter')})")
    return State(True, f"CPython {stamp.get('version')}")


def find(toolchain: Toolchain) -> Environment:
    """Return an installed environment. Raises ToolchainMissingError."""
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
