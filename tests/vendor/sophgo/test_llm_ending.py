"""`dlinfer compile` that is ended, or whose net fails: no process goes on, and no part of a file is left."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer.toolchain import find
from dlinfer.toolchain.folder import STAMP
from dlinfer.vendor.sophgo.compiler import cache as compiler_cache
from dlinfer.vendor.sophgo.compiler import process as compiler_process
from dlinfer.vendor.sophgo.compiler.options import BmodelOptions
from dlinfer.vendor.sophgo.errors import SophgoCompileError
from dlinfer.vendor.sophgo.llm import LlmOptions, compile_folder
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN
from tests.waiting import SECONDS, unchanged, until

FOR_EVER = 100_000
"""Seconds that a stand-in for a compiler takes: whoever waited for it would never come to an end here."""

COMPILER = f"""#!/bin/sh
sleep {FOR_EVER} &
kill -STOP $$
"""
"""A compiler with a process of its own; both do nothing, and end by force only."""

COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored by what runs behind it
from dlinfer.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(model_folder):
    return model_folder("llama")


@pytest.fixture
def own_cache(toolchain, tmp_path):
    """A cache in which no net is compiled, with the user's toolchain but for the Python that runs its compiler."""
    cache, real = tmp_path / "cache", find(TOOLCHAIN)
    place = cache / "toolchains" / real.folder.name
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").write_text(COMPILER)
    (place / "bin" / "python").chmod(0o755)
    (place / "lib").symlink_to(real.folder / "lib")
    shutil.copy(real.folder / STAMP, place / STAMP)
    return cache


def processes(word: str) -> set[int]:
    """Living processes with this in their command or their folder."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            said = (entry / "cmdline").read_bytes().decode(errors="replace") + os.readlink(entry / "cwd")
        except OSError:  # it has ended, or is a zombie
            continue
        if word in said and int(entry.name) != os.getpid():
            found.add(int(entry.name))
    return found


def left(place: Path) -> list[str]:
    """Files of half-made nets."""
    return [str(path) for path in place.rglob("*") if path.is_file() and path.suffix != ".bmodel"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
@pytest.mark.full
def test_the_command_ends_its_compilers(folder, own_cache, tmp_path, number):
    """Two run, each with a supervisor, and a process that it has started; none would end by itself."""
    scratch, to = tmp_path / "scratch", tmp_path / "out" / "model.bmodel"
    scratch.mkdir()
    told = [*"compile --engine sophgo --seq-length 32 --jobs 2 -o".split(), str(to), str(folder)]
    changes = {"DLINFER_CACHE_DIR": str(own_cache), "TMPDIR": str(scratch)}
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *told],
        env=os.environ | changes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        jobs = own_cache / "sophgo"
        until(lambda: len(processes(str(jobs))) == 6 or command.poll() is not None)
        assert command.poll() is None, command.communicate()
        until(lambda: unchanged(command.pid))  # it waits for one of them
        command.send_signal(number)
        _, said = command.communicate(timeout=SECONDS)
        until(lambda: not processes(str(own_cache)))
    finally:
        command.kill()
        command.wait()
        for compiler in processes(str(own_cache)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(compiler, signal.SIGKILL)
    assert command.returncode == 128 + number
    assert f"ended by {number.name}: {to} was not written" in said
    assert not list(scratch.iterdir()) and not list(to.parent.iterdir()) and not left(jobs)


IN_A_FINALIZER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dlinfer.cli import main
from dlinfer.vendor.sophgo.llm import build

class Dropping:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))

def for_ever(*arguments):
    Dropping()
    signal.pause()
    print("it went on")

build.compile_folder = for_ever
sys.exit(main("compile --engine sophgo -o model.bmodel folder".split()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_that_comes_while_an_object_is_finalized_ends_the_command(number):
    """Python drops what a finalizer raises."""
    said = subprocess.run(
        [sys.executable, "-c", IN_A_FINALIZER, str(int(number))],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert said.returncode == 128 + number, said
    assert f"ended by {number.name}: model.bmodel was not written" in said.stderr
    assert not said.stdout


@pytest.mark.full
def test_a_net_that_fails_ends_the_others(folder, toolchain, monkeypatch, tmp_path):
    """The first of two compiles for ever; the second fails."""
    begun = tmp_path / "begun"
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import os, subprocess, sys, time\n"
        f"begun = {str(begun)!r}\n"
        "try:\n"
        "    os.mkdir(begun)\n"
        "except FileExistsError:\n"
        "    sys.exit('error: it fails')\n"
        f"subprocess.Popen(['sleep', '{FOR_EVER}'])\n"
        f"time.sleep({FOR_EVER})\n"
    )
    scratch, cache = tmp_path / "scratch", tmp_path / "cache"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(compiler_process, "driver_command", lambda job: [sys.executable, str(tool)])
    monkeypatch.setattr(compiler_cache, "cache_folder", lambda: cache)
    to = tmp_path / "out" / "model.bmodel"
    options = LlmOptions(BmodelOptions(), seq_length=32, jobs=2)
    with pytest.raises(SophgoCompileError, match="it fails"):
        compile_folder(folder, to, options)
    assert begun.is_dir()
    until(lambda: not processes(str(cache)))
    assert not list(scratch.iterdir()) and not list(to.parent.iterdir())
    assert {path.name for path in (cache / "sophgo").iterdir()} == {"logs"}
