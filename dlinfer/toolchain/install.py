"""Install and remove environments."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from dlinfer.errors import ToolchainDiskError, ToolchainInstallError
from dlinfer.toolchain import process
from dlinfer.toolchain.folder import STAMP, Environment, environment, folder, root, state
from dlinfer.toolchain.interpreter import Interpreter, find_interpreter
from dlinfer.toolchain.recipe import Toolchain

Report = Callable[[str], None]
"""A function that gets a line about the current step, about once a second. A step that takes long repeats its line."""

_SECONDS = 3 * 3600.0
"""The time limit of one step in seconds. It is enough to download a gigabyte on a slow line."""


def install(toolchain: Toolchain, report: Report = lambda line: None) -> Environment:
    """Create the environment of a recipe, unless it is installed already. Return its paths.

    report: gets lines about the progress.

    An environment of an older recipe, or of an interrupted installation, is removed first. If two processes install the
    same toolchain at once, the second process waits and uses the first one's environment. If the installation fails,
    its environment is removed.

    Raises ToolchainInterpreterError, ToolchainDiskError and ToolchainInstallError.
    """
    with _locked(toolchain, report):
        if state(toolchain).installed:
            return environment(toolchain)
        place = folder(toolchain)
        interpreter = find_interpreter(toolchain.python, toolchain.name)
        _remove(place)
        check_disk(toolchain, place.parent)
        try:
            _make(toolchain, interpreter, report)
        except BaseException:
            _remove(place)
            raise
        return environment(toolchain)


def remove(toolchain: Toolchain) -> bool:
    """Remove a recipe's environment, finished or not. Returns False if there was none."""
    with _locked(toolchain, lambda line: None):
        there = folder(toolchain).exists()
        _remove(folder(toolchain))
        return there


def check_disk(toolchain: Toolchain, place: Path) -> None:
    """Raise ToolchainDiskError if the disk of ``place`` has less free space than the recipe needs."""
    free = shutil.disk_usage(place).free
    needed = toolchain.installed_bytes + toolchain.download_bytes
    if free < needed:
        raise ToolchainDiskError(
            toolchain=toolchain.name, folder=str(place), needed=gigabytes(needed), free=gigabytes(free)
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _make(toolchain: Toolchain, interpreter: Interpreter, report: Report) -> None:
    target = environment(toolchain)

    def run(line: str, command: list[str]) -> None:
        _run(toolchain, command, lambda: report(line))

    line = f"creating an environment of CPython {interpreter.version} ({interpreter.path})"
    run(line, [interpreter.path, "-I", "-m", "venv", str(target.folder)])
    downloads = (
        target.folder / "downloads"
    )  # on the disk that was checked, and removed with an unfinished environment
    downloads.mkdir()
    if toolchain.packages:
        _install_packages(toolchain, target, downloads, report)
    shutil.rmtree(downloads)
    for pattern in toolchain.remove:
        for path in target.site_packages.glob(pattern):
            path.unlink()
    for name, text in toolchain.files.items():
        path = target.site_packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if toolchain.check:
        run("checking the installation", [str(target.python), "-I", "-c", toolchain.check])
    stamp = {
        "recipe": toolchain.digest,
        "version": interpreter.version,
        "interpreter": interpreter.path,
        "packages": toolchain.packages,
    }
    (target.folder / STAMP).write_text(json.dumps(stamp, indent=1))


def _install_packages(toolchain: Toolchain, target: Environment, downloads: Path, report: Report) -> None:
    """Install all packages, without .pyc files. One call of pip installs all, because pip takes a second to start."""
    count = len(toolchain.packages)
    begun = 0

    def on_line(text: str) -> None:
        nonlocal begun
        begun += text.startswith("Collecting ")

    def beat() -> None:
        report(f"{toolchain.packages[max(begun, 1) - 1]} ({max(begun, 1)} of {count})")

    pip = [str(target.python), "-I", "-m", "pip", "--disable-pip-version-check", "install"]
    command = [*pip, "--no-input", "--no-deps", "--no-compile", *toolchain.packages]
    _run(toolchain, command, beat, on_line, TMPDIR=str(downloads))


def _run(
    toolchain: Toolchain,
    command: list[str],
    beat: Callable[[], None],
    on_line: Callable[[str], None] | None = None,
    **variables: str,
) -> None:
    """Run a command. If it fails, raise ToolchainInstallError with the command's last output lines.

    beat: called about once a second. on_line: called with each output line. variables: environment variables to add.
    """
    environment = {**os.environ, **variables}
    try:
        process.run(command, seconds=_SECONDS, environment=environment, beat=beat, on_line=on_line)
    except process.ProcessFailedError as failed:
        detail = f"{failed}: {' | '.join(map(str.strip, failed.lines))[-1000:]}"
        raise ToolchainInstallError(
            toolchain=toolchain.name, command=" ".join(command), detail=detail
        ) from failed


@contextlib.contextmanager
def _locked(toolchain: Toolchain, report: Report) -> Iterator[None]:
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f"{toolchain.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that installs or removes it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove(place: Path) -> None:
    """Remove an environment, its stamp first.

    If the removal is interrupted, the environment then counts as unfinished.
    """
    (place / STAMP).unlink(missing_ok=True)
    if place.exists():
        shutil.rmtree(place)
