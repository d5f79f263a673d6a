"""A rank that ends: the engine learns which one and how, and the others end."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dlinfer.framework.lmdeploy_ext.errors import RankEndedError
from dlinfer.framework.lmdeploy_ext.ranks import endings


class Executor:
    """What the watch needs of LMDeploy's MPExecutor: two processes that sleep."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.procs = [
            SimpleNamespace(_proc=context.Process(target=time.sleep, args=(600,))) for _ in range(2)
        ]
        for rank in self.procs:
            rank._proc.start()

    def end(self) -> None:
        for rank in self.procs:
            rank._proc.kill()
            rank._proc.join()


@pytest.fixture
def executor():
    made = Executor()
    yield made
    made.end()


def test_a_killed_rank(executor: Any):
    watch = endings.Watch(executor)

    async def killed() -> None:
        waits = asyncio.ensure_future(watch.wait())
        await asyncio.sleep(0.1)
        watch.check()
        assert not waits.done()
        executor.procs[1]._proc.kill()
        await asyncio.wait_for(waits, 20)

    asyncio.run(killed())
    with pytest.raises(
        RankEndedError, match=r"rank 1 of 2 ended: it was killed by SIGKILL .*memory runs out"
    ):
        watch.check()
    executor.procs[0]._proc.join(20)
    assert executor.procs[0]._proc.exitcode == -signal.SIGKILL


def test_ranks_that_the_engine_ends(executor: Any):
    watch = endings.Watch(executor)
    watch.close()
    executor.end()
    time.sleep(0.2)
    watch.check()


ORPHAN = """
import multiprocessing, os, sys, threading, time
from dlinfer.framework.lmdeploy_ext.ranks import endings
def rank():
    threading.Thread(target=endings._end_with_engine, daemon=True).start()
    time.sleep(600)
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=rank)
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_ranks_end_with_a_killed_engine():
    engine = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    rank = int(engine.stdout.readline())
    engine.kill()
    engine.wait()
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{rank}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{rank}")
