"""Workers end with their process and with their last user, however these end; nothing of them stays behind."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dlinfer.vendor.sophgo.runtime import device, worker
from tests.vendor.sophgo.conftest import relative
from tests.vendor.sophgo.test_runtime_faults import open_engine, worker_of
from tests.vendor.sophgo.test_sail_engine import FLOAT16, run
from tests.waiting import SECONDS, ended, until

ROOT = Path(__file__).parents[3]

OPEN = """
import os, sys
from dlinfer.vendor.sophgo import sail
engine = sail.EngineLLM(sys.argv[1], [0])
print(engine._model.devices[0].worker.pid, flush=True)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "os.kill(os.getpid(), 9)",
        pytest.param("os._exit(3)", marks=pytest.mark.full),
        pytest.param("raise SystemExit(1)", marks=pytest.mark.full),
    ],
)
def test_a_worker_ends_with_its_process(bmodel, end):
    done = subprocess.run(
        [sys.executable, "-c", OPEN + end, str(bmodel("bm1684x"))],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=ROOT,
        env={**os.environ, "DLINFER_SOPHGO_EMULATE": ""},
    )
    assert done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    until(lambda: ended(int(done.stdout)))


# Process 1 of a namespace, as in a container, in the session of all others: whoever loses its parent becomes its child.
FIRST = """
import os, signal, subprocess, sys, time
victim = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True)
worker = int(victim.stdout.readline())
assert os.getpid() == 1 and os.getsid(worker) == os.getsid(0)
limit = time.monotonic() + 120
while (state := open(f"/proc/{worker}/stat").read().rpartition(")")[2].split()[0]) != "T":
    assert time.monotonic() < limit, state
    time.sleep(0.01)
print("stopped")
victim.kill()
victim.wait()
limit = time.monotonic() + 120
while time.monotonic() < limit:
    if os.waitpid(worker, os.WNOHANG)[0]:
        print("gone")
        break
    time.sleep(0.05)
"""


@pytest.mark.full
def test_a_stopped_worker_ends_with_its_killed_process_where_process_1_is_of_their_session(bmodel):
    """There its process group is not orphaned, and the kernel sends it no SIGHUP."""
    unshare = [shutil.which("unshare") or "unshare", "--pid", "--fork", "--mount-proc"]
    try:
        tried = subprocess.run(
            [*unshare, "true"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        fault = tried.stderr.strip()
    except OSError as error:
        fault = str(error)
    if fault:
        pytest.skip(f"a PID namespace cannot be made here: {fault}")
    done = subprocess.run(
        [
            *unshare,
            sys.executable,
            "-c",
            FIRST,
            OPEN + "import time; time.sleep(1000)",
            str(bmodel("bm1684x")),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=ROOT,
        env={**os.environ, "DLINFER_SOPHGO_EMULATE": ""},
    )
    assert done.stdout.splitlines() == ["stopped", "gone"], done.stderr


def test_a_worker_outlives_the_thread_that_started_it(fresh, bmodel):
    """To the kernel a process's parent is a thread."""
    made = []
    thread = threading.Thread(target=lambda: made.append(open_engine(bmodel)))
    thread.start()
    thread.join()
    (engine,) = made
    time.sleep(0.2)
    assert relative(*run(engine, "mlp")) < FLOAT16


def test_a_worker_ends_with_the_last_that_uses_it(fresh, bmodel):
    engine = open_engine(bmodel)
    tensor = engine.get_input_tensor("mlp", 0)
    process = Path(f"/proc/{worker_of(engine).pid}")
    del engine
    gc.collect()
    assert tensor is not None
    tensor.zeros()
    assert process.exists()
    del tensor
    gc.collect()
    assert not process.exists()


@pytest.mark.full
def test_a_worker_ends_at_once_though_a_forks_child_has_its_wire(fresh, bmodel, monkeypatch):
    """By itself, which it is told to: nobody loses patience with it and ends it by force."""
    monkeypatch.setattr(worker, "_PATIENCE", SECONDS)
    engine = open_engine(bmodel)
    process = worker_of(engine)._process
    child = os.fork()
    if child == 0:
        time.sleep(2 * SECONDS)
        os._exit(0)
    try:
        del engine
        gc.collect()
        assert process.returncode == 0
        assert not Path(f"/proc/{process.pid}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forks_child_starts_a_worker_of_its_own(fresh, bmodel):
    """Also where another thread was opening a device at the fork, whose locks nobody gives back in the child."""
    engine = open_engine(bmodel)
    reading, writing = os.pipe()
    with device._lock:
        child = os.fork()
        if child == 0:
            threading.Thread(target=_open_and_tell, args=(bmodel, writing)).start()
            time.sleep(SECONDS)
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    assert text.startswith("ran ")
    assert int(text.split()[1]) != worker_of(engine).pid
    assert relative(*run(engine, "mlp")) < FLOAT16


def _open_and_tell(bmodel, writing: int) -> None:
    engine = open_engine(bmodel)
    ran = relative(*run(engine, "mlp")) < FLOAT16
    os.write(writing, f"{'ran' if ran else 'wrong'} {worker_of(engine).pid}".encode())
    os._exit(0)
