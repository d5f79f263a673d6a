"""What loading and unloading leaves behind, beside what the C library itself leaves."""

import gc
import os
import subprocess
from itertools import count
from pathlib import Path

import pytest

from dlinfer.toolchain import find
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.runtime import emulator
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN
from tests.resident import ROUNDS, least_growth, mapped_files, resident
from tests.vendor.sophgo.test_raw_library import RAW
from tests.vendor.sophgo.test_runtime_faults import open_engine, worker_of
from tests.vendor.sophgo.test_sail_engine import run
from tests.waiting import SECONDS

LOADS = 200
RUN_EVERY = 20
# Bytes over the loads of a round. Pages that malloc and Python take once more or less: measured 20 to 130 KiB over all
# loads in a worker, which grow no more after some hundreds, and 0 in the client. A leak of 2 KiB a load would be 100.
NOISE = 64 << 10


def of_the_library(path: Path) -> int:
    """Bytes that the C library alone keeps of the loads of a round: measured 0 to 2 KiB."""
    script = str(RAW / "leak_of_loads.py")
    command = [
        str(find(TOOLCHAIN).python),
        "-S",
        script,
        str(emulator.folder("bm1684x")),
        str(path),
        str(LOADS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    before, after = next(line for line in done.stdout.splitlines() if line.startswith("resident")).split()[1:]
    return max(0, int(after) - int(before)) * 1024 // ROUNDS


@pytest.mark.full
def test_loading_and_unloading_leaks_nothing(fresh, bmodel):
    """From a file and from bytes, some with a run; the worker stays, since another engine is on its device."""
    path = bmodel("bm1684x")
    data = path.read_bytes()

    def once(index: int) -> None:
        engine = sail.EngineLLM(str(path), [0]) if index % 2 else sail.EngineLLM(data, len(data), [0])
        if index % RUN_EVERY == 0:
            run(engine, "mlp")

    def held() -> tuple[int, int]:
        gc.collect()
        worker.call("free", numbers=[])  # and before it what nobody wants
        return resident(), resident(worker.pid)

    def counted() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), mapped_files(worker.pid)

    def some_loads() -> None:
        for _ in range(LOADS // ROUNDS):
            once(next(numbers))

    kept = open_engine(bmodel)
    worker = worker_of(kept)
    for index in range(RUN_EVERY + 1):  # what the libraries allocate once
        once(index)
    numbers = count()
    gc.collect()
    before = counted()
    client, process = least_growth(held, some_loads)
    library = of_the_library(path)
    print(
        f"bytes more a round: {client} in the client, {process} in the worker, {library} in the C library alone"
    )
    assert counted() == before
    assert client < NOISE
    assert process < NOISE + library
