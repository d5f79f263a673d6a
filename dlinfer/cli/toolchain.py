"""``dlinfer toolchain``: list, install, find and remove the environments that some vendors need."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from dlinfer.errors import (
    DlinferError,
    ToolchainInterpreterError,
    UnknownToolchainError,
    VendorClashError,
    VendorLoadError,
)
from dlinfer.toolchain import Toolchain, find, folder, state
from dlinfer.toolchain.install import gigabytes, install, remove
from dlinfer.vendor import discovery

NO_INTERPRETER = 3
"""The exit status if no CPython of the required version exists. It lets scripts tell this case from a failure."""


def run(arguments: argparse.Namespace) -> int:
    try:
        return _ACTIONS[arguments.action](getattr(arguments, "names", []))
    except ToolchainInterpreterError as error:
        sys.stderr.write(f"error: {error}\n")
        return NO_INTERPRETER
    except (DlinferError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def known() -> dict[str, Toolchain]:
    """Return toolchain name -> recipe, of all vendors with a toolchain. Vendors that cannot be loaded are skipped."""
    recipes = {}
    for name in discovery.names():
        try:
            vendor = discovery.get(name)
        except (VendorLoadError, VendorClashError):
            continue  # ``dlinfer doctor`` reports the fault
        if vendor.toolchain is not None:
            recipe = vendor.toolchain()
            recipes[recipe.name] = recipe
    return recipes


def _chosen(names: Sequence[str]) -> list[Toolchain]:
    recipes = known()
    for name in names:
        if name not in recipes:
            raise UnknownToolchainError(name=name, known=", ".join(sorted(recipes)) or "none")
    return [recipes[name] for name in names]


def _list(names: Sequence[str]) -> int:
    for recipe in known().values():
        current = state(recipe)
        word = "installed" if current.installed else "missing"
        sys.stdout.write(f"{recipe.name:<12} {word:<10} {recipe.summary}\n")
        sys.stdout.write(f"{'':<23} {current.reason}; {folder(recipe)}\n")
        if not current.installed:
            sys.stdout.write(f"{'':<23} `dlinfer toolchain install {recipe.name}` needs {_takes(recipe)}\n")
    return 0


def _install(names: Sequence[str]) -> int:
    for recipe in _chosen(names):
        if state(recipe).installed:
            sys.stdout.write(f"{recipe.name}: already installed in {folder(recipe)}\n")
            continue
        _install_shown(recipe)
        sys.stdout.write(f"{recipe.name}: installed in {folder(recipe)}\n")
    return 0


def _path(names: Sequence[str]) -> int:
    for recipe in _chosen(names):
        sys.stdout.write(f"{find(recipe).folder}\n")
    return 0


def _remove(names: Sequence[str]) -> int:
    for recipe in _chosen(names):
        done = "removed" if remove(recipe) else "was not installed"
        sys.stdout.write(f"{recipe.name}: {done}\n")
    return 0


_ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": _list,
    "install": _install,
    "path": _path,
    "remove": _remove,
}


def _takes(recipe: Toolchain) -> str:
    return (
        f"{gigabytes(recipe.installed_bytes)} of disk space, and {gigabytes(recipe.download_bytes)} more during the "
        "installation"
    )


def _install_shown(recipe: Toolchain) -> None:
    """Install a toolchain and show progress.

    On a terminal, a bar shows how many of the expected bytes are installed. A pipe gets a line for each step.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        sys.stderr.write(f"{recipe.name}: {recipe.summary}; it needs {_takes(recipe)}\n")
        install(recipe, _lines(recipe.name))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as shown:
        task = shown.add_task(recipe.name, total=recipe.installed_bytes)

        def report(line: str) -> None:
            shown.update(task, description=f"{recipe.name}: {line}", completed=_size(folder(recipe)))

        install(recipe, report)
        shown.update(task, completed=recipe.installed_bytes)


def _lines(name: str) -> Callable[[str], None]:
    """Return a function that prints a line to standard error unless it equals the line before."""
    last = ""

    def report(line: str) -> None:
        nonlocal last
        if line != last:
            sys.stderr.write(f"{name}: {line}\n")
            last = line

    return report


def _size(place: Path) -> int:
    """Return the size in bytes of all files in a folder. Other processes may add and remove files meanwhile."""
    total = 0
    for parent, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
