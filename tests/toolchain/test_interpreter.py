"""Which CPython is taken for a toolchain: PATH, pyenv, uv; each is run before it is believed."""

import os
import sys
from pathlib import Path

import pytest

from dlinfer.errors import ToolchainInterpreterError
from dlinfer.toolchain.interpreter import find_interpreter

FULL = ".".join(map(str, sys.version_info[:3]))
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without any Python but what the test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    return tmp_path


def real(path: Path) -> Path:
    return script(path, f'exec "{os.path.realpath(sys.executable)}" "$@"')


def test_of_path_first(machine):
    mine = real(machine / f"bin/python{HERE}")
    real(machine / f"home/.pyenv/versions/{FULL}/bin/python{HERE}")
    found = find_interpreter(HERE, "tiny")
    assert (found.path, found.version) == (str(mine), FULL)


def test_a_shim_that_leads_nowhere_is_passed_over(machine):
    script(machine / f"bin/python{HERE}", "echo 'pyenv: command not found' >&2; exit 127")
    mine = real(machine / f"home/.pyenv/versions/{HERE}.99/bin/python{HERE}")
    assert find_interpreter(HERE, "tiny").path == str(mine)


def test_of_pyenv_the_newest(machine, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(machine / "pyenv"))
    for patch in ("9", "13", "2"):
        real(machine / f"pyenv/versions/{HERE}.{patch}/bin/python{HERE}")
    assert find_interpreter(HERE, "tiny").path == str(machine / f"pyenv/versions/{HERE}.13/bin/python{HERE}")


def test_of_uv(machine):
    mine = real(machine / "elsewhere/python")
    script(
        machine / "bin/uv",
        f'[ "$*" = "python find --no-project --no-python-downloads {HERE}" ] && echo {mine}',
    )
    assert find_interpreter(HERE, "tiny").path == str(mine)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ('echo \'["PyPy", "3.10.1"]\'', "it is PyPy"),
        ('echo \'["CPython", "3.12.1"]\'', "it is CPython 3.12.1"),
        ("echo hello", "it is not a Python interpreter"),
        ("echo \"No module named 'ensurepip'\" >&2; exit 1", "No module named 'ensurepip'"),
    ],
)
def test_what_will_not_do_is_named_with_what_to_do(machine, says, why):
    script(machine / "bin/python3.10", says)
    with pytest.raises(ToolchainInterpreterError, match=why) as raised:
        find_interpreter("3.10", "sophgo")
    for advice in ("uv python install 3.10", "pyenv install 3.10", "apt install python3.10"):
        assert advice in str(raised.value)


@pytest.mark.usefixtures("machine")
def test_none_at_all():
    with pytest.raises(
        ToolchainInterpreterError, match=r"there is no python3\.10 on PATH, in pyenv or in uv"
    ):
        find_interpreter("3.10", "sophgo")
