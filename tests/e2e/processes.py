"""Processes of the end-to-end tests: those that run to their end, and those that answer one job after another."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.workers import ROOT, Ended, Worker

# Seconds for helpers such as multiprocessing's resource tracker to notice that their parent has gone, on a machine that
# does much else besides.
GRACE = 120.0

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_process(command: list[str], timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own and leave nothing of it behind.

    Raises:
        AssertionError: it took longer than ``timeout`` seconds, or a descendant outlived it by more than ``GRACE``;
            either way the whole process group is killed first. The message ends with the command's output.
    """
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | _ENVIRONMENT | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    trouble = None
    try:
        out, err = child.communicate(timeout=timeout)
        if not _group_ends(child.pid, within=GRACE):
            trouble = "left processes behind"
    except subprocess.TimeoutExpired:
        trouble = f"was still running after {timeout} s"
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
    finally:
        if _group_is_alive(child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    assert trouble is None, f"{' '.join(command)} {trouble}\n{out[-2000:]}\n{err[-6000:]}"
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def _group_ends(group: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while _group_is_alive(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    # What is dead may stay in the group for ever, where the first process of a container buries nobody.
    return any(_runs(process, group) for process in psutil.process_iter())


def _runs(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # gone meanwhile
        return False


class Processes:
    """Processes that wait for jobs. One takes longer to start than an engine to answer, so those that ask for the same
    module in the same environment share one."""

    def __init__(self, jobs: int = 40, kept: int = 4) -> None:
        """jobs: after which one is replaced, since what an engine has compiled stays in
        its memory. kept: how many wait for more."""
        self._jobs, self._kept = jobs, kept
        self._workers: dict[tuple[str, ...], Worker] = {}
        # transformers copies remote code beneath HF_HOME, while another process may be reading what lies there
        self._home = tempfile.TemporaryDirectory(prefix="dlinfer-e2e-")

    def ask(self, module: str, job: dict[str, Any], seconds: float, environment: dict[str, str]) -> str:
        """Have a job done; gives what was printed meanwhile. Raises AssertionError with that where the process ends, or
        takes longer."""
        worker = self._worker(module, environment)
        since = worker.logged()
        try:
            answer = worker.ask(job, seconds)
        except Ended as ended:
            raise AssertionError(f"{module}: {ended.kind}: {ended}") from None
        assert "raised" not in answer, answer["raised"]
        return worker.log(since)

    def close(self) -> None:
        """Let all end by themselves. Raises AssertionError where one left processes behind."""
        for key in list(self._workers):
            self._close(key)
        self._home.cleanup()

    def _worker(self, module: str, environment: dict[str, str]) -> Worker:
        key = (module, *(f"{name}={value}" for name, value in sorted(environment.items())))
        worker = self._workers.pop(key, None)
        if worker is None:
            home = tempfile.mkdtemp(dir=self._home.name)
            given = _ENVIRONMENT | {"HF_HOME": home} | environment
            worker = Worker(module, Path(home), given, self._jobs)
            for oldest in list(self._workers)[: -self._kept + 1]:
                self._close(oldest)
        self._workers[key] = worker  # the latest is the last
        return worker

    def _close(self, key: tuple[str, ...]) -> None:
        worker = self._workers.pop(key)
        group = worker.leave(GRACE)
        try:
            assert not group or _group_ends(group, within=GRACE), (
                f"{key} left processes behind\n{worker.log()[-6000:]}"
            )
        finally:
            worker.end()
