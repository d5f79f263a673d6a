"""`dlinfer compile` that is ended, or whose net fails: no process goes on, and no part of a file is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlinfer import settings
from dlinfer.vendor.sophgo import compiler_cache, compiler_process
from dlinfer.vendor.sophgo.compiler_group import Group
from dlinfer.vendor.sophgo.compiler_options import BmodelOptions
from dlinfer.vendor.sophgo.errors import SophgoCompileError
from dlinfer.vendor.sophgo.llm import LlmOptions, compile_folder

PROMPT_END = 10.0
"""Seconds in which the command ends; a compiler that it waited for would take longer, or for ever."""


@pytest.fixture
def folder(model_folder):
    return model_folder("llama")


@pytest.fixture
def own_cache(toolchain, tmp_path):
    """A cache in which no net is compiled, with the toolchain of the user's."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "toolchains").symlink_to(settings.cache_folder() / "toolchains")
    return cache


def until(done, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


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
def test_the_command_ends_its_compilers(folder, own_cache, tmp_path, number):
    """Two run, and are stopped here, so that they would never end by themselves."""
    scratch, to = tmp_path / "scratch", tmp_path / "out" / "model.bmodel"
    scratch.mkdir()
    told = [*"compile --engine sophgo --seq-length 32 --jobs 2 -o".split(), str(to), str(folder)]
    changes = {"DLINFER_CACHE_DIR": str(own_cache), "TMPDIR": str(scratch)}
    command = subprocess.Popen(
        [sys.executable, "-m", "dlinfer", *told],
        env=os.environ | changes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        jobs = own_cache / "sophgo"
        until(lambda: len(list(jobs.glob(".compiling-*/first/job.json"))) == 2)
        until(lambda: len(processes(str(jobs))) >= 2)
        for compiler in processes(str(jobs)):
            os.kill(compiler, signal.SIGSTOP)
        start = time.monotonic()
        command.send_signal(number)
        _, said = command.communicate(timeout=60)
        assert time.monotonic() - start < PROMPT_END
        until(lambda: not processes(str(own_cache)), PROMPT_END)
    finally:
        command.kill()
        command.wait()
        for compiler in processes(str(own_cache)):
            os.kill(compiler, signal.SIGKILL)
    assert command.returncode == 128 + number
    assert f"ended by {number.name}: {to} was not written" in said
    assert not list(scratch.iterdir()) and not list(to.parent.iterdir()) and not left(jobs)


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
        "subprocess.Popen(['sleep', '1000'])\n"
        "time.sleep(1000)\n"
    )
    scratch, cache = tmp_path / "scratch", tmp_path / "cache"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(compiler_process, "driver_command", lambda job: [sys.executable, str(tool)])
    monkeypatch.setattr(compiler_cache, "cache_folder", lambda: cache)
    to = tmp_path / "out" / "model.bmodel"
    options = LlmOptions(BmodelOptions(), seq_length=32, jobs=2)
    start = time.monotonic()
    with pytest.raises(SophgoCompileError, match="it fails"):
        compile_folder(folder, to, options)
    assert time.monotonic() - start < PROMPT_END
    assert begun.is_dir()
    assert not processes(str(cache))
    assert not list(scratch.iterdir()) and not list(to.parent.iterdir())
    assert {path.name for path in (cache / "sophgo").iterdir()} == {"logs"}


def test_a_compiler_ends_when_its_caller_is_gone(toolchain, tmp_path):
    """Then the pipe that is its standard input has an end; until then it waits for its job, which never comes."""
    job = tmp_path / "job.json"
    os.mkfifo(job)
    group = Group(compiler_process.driver_command(job), tmp_path, os.environ)
    try:
        assert group._process.stdin is not None
        group._process.stdin.close()
        assert group._process.wait(PROMPT_END) == -signal.SIGKILL
    finally:
        group.kill()
