"""Find a CPython of another version: on PATH, from pyenv or from uv. Nothing is downloaded."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlinfer.errors import ToolchainInterpreterError

_ASK = (
    "import sys, platform, json, venv, ensurepip;"
    "print(json.dumps([platform.python_implementation(), platform.python_version()]))"
)
_SECONDS = 30


@dataclass(frozen=True)
class Interpreter:
    """A CPython. path: the path of the executable. version: the full version, such as "3.10.13"."""

    path: str
    version: str


def find_interpreter(version: str, toolchain: str) -> Interpreter:
    """Return a CPython of ``version``, such as "3.10", that can create environments.

    toolchain: the name of the toolchain that needs the CPython, for the error's text.

    Each candidate is run once, because a pyenv shim may point to nothing, and Debian's Python may lack venv. Raises
    ToolchainInterpreterError, which lists the candidates and why each is unusable.
    """
    faults = []
    for path in _candidates(version):
        answer = _asked(path, version)
        if isinstance(answer, Interpreter):
            return answer
        faults.append(f"{path}: {answer}")
    looked = "; ".join(faults) or f"there is no python{version} on PATH, in pyenv or in uv"
    raise ToolchainInterpreterError(toolchain=toolchain, version=version, looked=looked)


def _candidates(version: str) -> Iterator[str]:
    """Yield paths of executables that may be a CPython of this version, the preferred ones first.

    No path occurs twice.
    """
    seen = set()
    for path in (*_on_path(version), *_of_pyenv(version), *_of_uv(version)):
        if path not in seen:
            seen.add(path)
            yield path


def _on_path(version: str) -> Iterator[str]:
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        python = shutil.which(f"python{version}", path=folder) if folder else None
        if python:
            yield python


def _of_pyenv(version: str) -> Iterator[str]:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    pythons = list(root.glob(f"{version}.*/bin/python{version}"))
    yield from map(str, sorted(pythons, key=lambda path: _number(path.parts[-3]), reverse=True))


def _of_uv(version: str) -> Iterator[str]:
    uv = shutil.which("uv")
    if uv is None:
        return
    answer = _run([uv, "python", "find", "--no-project", "--no-python-downloads", version])
    if answer is not None and answer.returncode == 0 and answer.stdout.strip():
        yield answer.stdout.strip()


def _asked(path: str, version: str) -> Interpreter | str:
    """Run an executable. Return an Interpreter, or a text: the reason why the executable is unusable."""
    answer = _run([path, "-I", "-c", _ASK])
    if answer is None:
        return "it cannot be run"
    if answer.returncode:
        return (answer.stderr.strip().splitlines() or ["it fails"])[-1]
    try:
        implementation, full = json.loads(answer.stdout)
    except ValueError:
        return "it is not a Python interpreter"
    if implementation != "CPython":
        return f"it is {implementation}"
    if full.split(".")[:2] != version.split("."):
        return f"it is CPython {full}"
    return Interpreter(path, full)


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else -1 for part in version.split("."))
