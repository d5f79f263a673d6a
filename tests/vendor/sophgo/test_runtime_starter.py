"""Starting a worker's process: in the one thread that starts them all, interrupted, or refused by the system."""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlinfer.vendor.sophgo.errors import SophgoWorkerError
from dlinfer.vendor.sophgo.runtime import starter
from dlinfer.vendor.sophgo.runtime.worker import Worker
from tests.vendor.sophgo.waiting import until


def sleeping() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])


def test_all_start_in_one_thread_that_is_not_the_callers():
    threads = []

    def job() -> subprocess.Popen[bytes]:
        threads.append(threading.current_thread())
        return sleeping()

    for _ in range(2):
        with starter.start(job) as process:
            process.kill()
    assert threads[0] is threads[1]
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon  # it keeps no interpreter from ending


def test_an_interrupt_while_it_starts_ends_the_process_that_comes_of_it():
    interrupted, raised, started = threading.Event(), [], []
    caller = threading.get_ident()

    def job() -> subprocess.Popen[bytes]:
        # A signal just before the thread goes to sleep does not wake it; the next one does.
        until(lambda: signal.pthread_kill(caller, signal.SIGALRM) or interrupted.is_set())
        started.append(sleeping())
        return started[0]

    def once(*_: object) -> None:
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, once)
    try:
        with pytest.raises(KeyboardInterrupt):
            starter.start(job)
    finally:
        interrupted.set()
        until(lambda: bool(started))  # and no signal comes any more
        signal.signal(signal.SIGALRM, before)
    until(lambda: started[0].returncode is not None)
    assert started[0].returncode == -signal.SIGKILL


def test_a_worker_that_cannot_be_started(monkeypatch, tmp_path):
    """Nothing of it stays open."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(SophgoWorkerError, match=r"stand-in could not be started: .*No such file"):
        Worker("a stand-in", tmp_path, emulated=True)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SophgoWorkerError):
            Worker("a stand-in", tmp_path, emulated=True)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_files_are_left_to_start_one_with(monkeypatch, tmp_path):
    def none(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    with pytest.raises(SophgoWorkerError, match="Too many open files"):
        Worker("a stand-in", Path(tmp_path), emulated=True)
