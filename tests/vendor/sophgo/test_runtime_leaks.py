"""What loading and unloading leaves behind, beside what the C library itself leaves."""

import gc
import os
import subprocess
from pathlib import Path

from dlinfer.toolchain import find
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.runtime import emulator
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN
from tests.vendor.sophgo.test_raw_library import RAW
from tests.vendor.sophgo.test_runtime_faults import open_engine, worker_of
from tests.vendor.sophgo.test_sail_engine import run

LOADS = 200
RUN_EVERY = 20
# KiB over all loads. Pages that malloc and Python take once more or less: measured 20 to 130 in a worker, which grow no
# more after some hundreds of loads, and 0 in the client. A leak of 2 KiB a load would be 400.
NOISE = 256


def resident(pid: int) -> int:
    """KiB of memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def of_the_library(path: Path) -> int:
    """KiB that the C library alone keeps of as many loads: measured 0 to 8."""
    script = str(RAW / "leak_of_loads.py")
    command = [
        str(find(TOOLCHAIN).python),
        "-S",
        script,
        str(emulator.folder("bm1684x")),
        str(path),
        str(LOADS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    before, after = next(line for line in done.stdout.splitlines() if line.startswith("resident")).split()[1:]
    return max(0, int(after) - int(before))


def test_loading_and_unloading_leaks_nothing(fresh, bmodel):
    """From a file and from bytes, some with a run; the worker stays, since another engine is on its device."""
    path = bmodel("bm1684x")
    data = path.read_bytes()

    def once(index: int) -> None:
        engine = sail.EngineLLM(str(path), [0]) if index % 2 else sail.EngineLLM(data, len(data), [0])
        if index % RUN_EVERY == 0:
            run(engine, "mlp")

    def held() -> tuple[int, int, int]:
        gc.collect()
        worker.call("free", numbers=[])  # and before it what nobody wants
        return resident(os.getpid()), resident(worker.pid), len(os.listdir("/proc/self/fd"))

    kept = open_engine(bmodel)
    worker = worker_of(kept)
    for index in range(RUN_EVERY + 1):  # what the libraries allocate once
        once(index)
    before = held()
    for index in range(LOADS):
        once(index)
    after = held()
    library = of_the_library(path)
    print(
        f"{LOADS} loads: RSS of the client {before[0]} -> {after[0]} KiB, of the worker {before[1]} -> {after[1]} KiB, "
        f"of the C library alone {library} KiB more"
    )
    assert after[2] == before[2]
    assert after[0] - before[0] < NOISE
    assert after[1] - before[1] < NOISE + library
