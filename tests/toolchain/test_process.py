"""Programs as processes: what they print, how they end, and that nothing of them outlives their caller."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlinfer.toolchain import process
from dlinfer.toolchain.process import ProcessFailedError, Stop, StoppedError, run
from tests.waiting import SECONDS, ended, until

FOR_EVER = 100_000


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def asleep(pids: Path) -> str:
    """Code that starts another process, writes both numbers, and sleeps with it."""
    return (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '{FOR_EVER}'])\n"
        "print('asleep', flush=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} all')\n"
        f"time.sleep({FOR_EVER})\n"
    )


def written(pids: Path) -> bool:
    return pids.exists() and pids.read_text().endswith("all")


def all_end(pids: Path) -> None:
    for pid in map(int, pids.read_text().split()[:2]):
        until(lambda pid=pid: ended(pid))


def test_what_it_prints_is_given_told_and_kept(tmp_path):
    log, told = tmp_path / "log", []
    code = (
        "import os, sys; print(os.getcwd()); print(sys.stdin.read() == '', file=sys.stderr);"
        "print(os.environ['A'], end='')"
    )
    environment = {"A": "ä", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-S", "-u", "-c", code]
    lines = run(
        command, seconds=SECONDS, folder=tmp_path, environment=environment, log=log, on_line=told.append
    )
    assert lines == told == [str(tmp_path), "True", "ä"]
    assert log.read_text() == f"{tmp_path}\nTrue\nä"


def test_the_last_lines_are_kept():
    lines = run(python("for i in range(1000): print(i, 'x' * 1000)"), seconds=SECONDS)
    assert [line.split()[0] for line in lines] == [str(i) for i in range(960, 1000)]
    assert {len(line) for line in lines} == {500}


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("print('why'); raise SystemExit(3)", "ended with status 3"),
        ("import os; print('why', flush=True); os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("import os; print('why', flush=True); os.kill(os.getpid(), 15)", "ended by signal 15"),
        ("import os; print('why', flush=True); os.abort()", "ended by signal 6"),
    ],
)
def test_how_it_failed(code, how):
    with pytest.raises(ProcessFailedError, match=how) as failed:
        run(python(code), seconds=SECONDS)
    assert failed.value.lines == ("why",)


def test_what_cannot_be_run(tmp_path):
    with pytest.raises(ProcessFailedError, match="status 127") as failed:
        run([tmp_path / "none"], seconds=SECONDS)
    assert failed.value.lines == (f"{tmp_path / 'none'} cannot be run: No such file or directory",)


def test_at_its_limit_it_is_ended_with_all_it_started(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    monkeypatch.setattr(process, "monotonic", lambda: 1e9 if written(pids) else 0.0)
    with pytest.raises(ProcessFailedError, match="ended after 3 s") as failed:
        run(python(asleep(pids)), seconds=3)
    assert failed.value.lines == ("asleep",)
    all_end(pids)


def test_an_interrupt_ends_it_with_all_it_started(tmp_path):
    pids = tmp_path / "pids"

    def beat() -> None:
        if written(pids):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(python(asleep(pids)), seconds=SECONDS, beat=beat)
    all_end(pids)


def test_another_thread_ends_it_and_lets_none_start_after_that(tmp_path):
    pids, stop = tmp_path / "pids", Stop()
    other = threading.Thread(target=lambda: until(lambda: written(pids)) or stop.now())
    other.start()
    with pytest.raises(StoppedError):
        run(python(asleep(pids)), seconds=SECONDS, stop=stop)
    other.join()
    all_end(pids)
    with pytest.raises(StoppedError):
        run(python(f"open({str(tmp_path / 'ran')!r}, 'w')"), seconds=SECONDS, stop=stop)


def test_what_a_program_leaves_behind_ends_with_it(tmp_path):
    """It has the program's output, which is not waited for."""
    pids = tmp_path / "pids"
    code = (
        f"import subprocess; child = subprocess.Popen(['sleep', '{FOR_EVER}'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{child.pid}} {{child.pid}} all'); print('done')"
    )
    assert run(python(code), seconds=SECONDS) == ["done"]
    all_end(pids)


CALLER = """
import os, sys, threading, time
from dlinfer.toolchain.process import run
if sys.argv[2] == "forked":
    def fork():
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.02)
        if os.fork() == 0:  # it has the caller's end of the pipe, too
            open(sys.argv[3] + ".fork", "w").write(str(os.getpid()))
            time.sleep(100_000)
    threading.Thread(target=fork, daemon=True).start()
def call():
    run([sys.executable, "-c", sys.argv[1]], seconds=100_000)
thread = threading.Thread(target=call)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("kind", ["alone", "forked"])
def test_it_ends_when_its_caller_is_killed(tmp_path, kind):
    """Where a fork holds the caller's end of the pipe, the kernel tells."""
    pids, fork = tmp_path / "pids", tmp_path / "pids.fork"
    caller = subprocess.Popen([sys.executable, "-c", CALLER, asleep(pids), kind, str(pids)])
    try:
        until(lambda: written(pids) and (kind == "alone" or (fork.exists() and fork.read_text() != "")))
        caller.kill()
        caller.wait()
        all_end(pids)
    finally:
        caller.kill()
        caller.wait()
        if fork.exists():
            os.kill(int(fork.read_text()), signal.SIGKILL)


def test_own_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    made = process.own_environment(ADDED="1")
    assert made["ADDED"] == "1" and made["PATH"] == os.environ["PATH"]
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(made)


def test_nothing_stays_open():
    run(python("pass"), seconds=SECONDS)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run(python("print(1)"), seconds=SECONDS)
    assert len(os.listdir("/proc/self/fd")) == before
