"""Starting a process that ends with this one: in the one thread that starts them all, and interrupted."""

import signal
import subprocess
import sys
import threading

import pytest

from dlinfer.toolchain import starter
from tests.waiting import until


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
