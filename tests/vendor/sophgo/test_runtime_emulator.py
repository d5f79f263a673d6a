"""The folder of an emulator, the shim that a compiler makes in it, files that are none: what goes wrong is said."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlinfer.vendor.sophgo.errors import SophgoModelError, SophgoUnavailableError
from dlinfer.vendor.sophgo.runtime import bmodel as bmodel_file
from dlinfer.vendor.sophgo.runtime import chips, emulator
from tests.waiting import SECONDS


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler of a shell's lines; the place is the folder of an emulator."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def make(lines: str) -> Path:
        (programs / "odd-cc").write_text(lines)
        (programs / "odd-cc").chmod(0o755)
        return tmp_path

    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr(emulator, "_COMPILERS", ("odd-cc",))
    return make


def test_a_compiler_that_does_not_end(compiler, monkeypatch):
    monkeypatch.setattr(emulator, "_COMPILE_SECONDS", 0.3)
    started = time.monotonic()
    place = compiler("#!/bin/sh\nexec sleep 1000\n")
    assert "odd-cc did not end in 0.3 seconds" in emulator.without_shim(place)
    assert time.monotonic() - started < SECONDS
    assert [each.name for each in place.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("#!/bin/sh\nprintf 'no such \\377 thing' >&2\nexit 3\n", "odd-cc failed: no such \ufffd thing"),
        ("#!/nowhere\n", "No such file"),
        ("#!/bin/sh\n", "No such file"),  # it says that it did it, and has made nothing
    ],
)
def test_a_compiler_that_fails(compiler, lines, said):
    assert said in emulator.without_shim(compiler(lines))


def test_a_folder_that_cannot_be_written(toolchain, tmp_path, monkeypatch):
    (tmp_path / "sophgo").write_text("a file where a folder should be")
    monkeypatch.setattr(emulator, "cache_folder", lambda: tmp_path)
    with pytest.raises(SophgoUnavailableError, match=r"its folder cannot be created.*DLINFER_CACHE_DIR"):
        emulator.folder("bm1684x")


def test_a_linker_configuration_that_cannot_be_read(tmp_path):
    place = tmp_path / "etc/ld.so.conf.d"
    place.mkdir(parents=True)
    (place / "a.conf").mkdir()
    (place / "b.conf").write_bytes(b"/nowhere/\xff\n")
    assert chips.libsophon(tmp_path) is None


# --- files that are none


@pytest.mark.parametrize("name", [".", "pipe", "zero\0byte"])
def test_what_is_no_file_is_not_opened(tmp_path, name):
    """Opening a pipe would wait for somebody who writes to it."""
    subprocess.run(["mkfifo", str(tmp_path / "pipe")], check=True)
    with pytest.raises(SophgoModelError, match="it is not a file"):
        bmodel_file.read_file(tmp_path / name)


def test_a_path_that_is_too_long(tmp_path):
    with pytest.raises(SophgoModelError, match="too long"):
        bmodel_file.read_file(tmp_path / ("a" * 5000))


def test_importing_sail_starts_nothing():
    """No thread, no process, no library of Sophgo's."""
    code = (
        "import threading\n"
        "before = threading.active_count()\n"
        "from dlinfer.vendor.sophgo import sail\n"
        "print(threading.active_count() - before, 'libbm' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 False\n"
