"""The load of other processes, as /proc tells it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import load


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_spent_is_what_a_process_used():
    before, used = load.spent(os.getpid()), time.process_time()
    spin(0.3)
    # Ticks are of 10 ms, and both ends are rounded.
    assert load.spent(os.getpid()) - before == pytest.approx(time.process_time() - used, abs=0.05)


def test_spent_counts_children_that_were_waited_for():
    before = load.spent(os.getpid())
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load.spent(os.getpid()) - before > 0.25


def test_a_name_with_brackets_and_spaces():
    comm = Path("/proc/self/comm")
    name = comm.read_text()
    before = load.spent(os.getpid())
    try:
        comm.write_text("a) R 1 (2 3")
        assert 0 <= load.spent(os.getpid()) - before < 0.1
    finally:
        comm.write_text(name)


def test_busy_grows_by_at_least_what_this_process_uses():
    before = load.busy()
    spin(0.3)
    assert load.busy() - before > 0.25


@pytest.mark.parametrize(
    ("busy", "ours", "seconds", "others"),
    [
        ((10.0, 14.0), (1.0, 3.0), 2.0, 1.0),  # two seconds of others' in two
        ((10.0, 12.0), (1.0, 3.0), 2.0, 0.0),
        ((10.0, 11.9), (1.0, 3.0), 2.0, 0.0),  # rounding takes none below nothing
        ((10.0, 10.0), (1.0, 1.0), 0.0, 0.0),  # no time at all
    ],
)
def test_others(busy, ours, seconds, others, monkeypatch):
    readings = {"busy": iter(busy), "spent": iter(ours)}
    monkeypatch.setattr(load, "busy", lambda: next(readings["busy"]))
    monkeypatch.setattr(load, "spent", lambda _: next(readings["spent"]))
    assert load.Watch(1, 100.0).others(100.0 + seconds) == pytest.approx(others)


def test_a_process_beside_is_seen():
    """Whatever else the machine does, which only adds to it."""
    watch = load.Watch(os.getpid(), time.perf_counter())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.1)
        while load.spent(process.pid) < 0.3:
            time.sleep(0.05)
        others = watch.others(time.perf_counter())
        process.kill()
    assert others > 0.05
