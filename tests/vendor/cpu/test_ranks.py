"""Sums over the ranks of a host: through shared memory in C++, with processes that end, wait and differ."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import needs_compiler

pytestmark = needs_compiler
ROOT = Path(__file__).parents[3]

# Joins a group by torch.distributed, then runs ``body`` with rank, count, group and all_reduce.
RANK = """
import os, sys, time
import torch
from torch import distributed
from dlinfer import ops
from dlinfer.ops.collective import groups
from dlinfer.vendor.cpu import ranks
rank, count, store, shares = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "shared"
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
group = groups.register(distributed.group.WORLD)
if shares:
    assert ranks.share_memory(group, spins=count <= len(os.sched_getaffinity(0)))
assert ranks.shares_memory(group) == shares

def all_reduce(x):
    return ops.all_reduce(x, distributed.group.WORLD)

def of_rank(rank, size, dtype):
    generator = torch.Generator().manual_seed(size * 8 + rank)
    return torch.randn(size, generator=generator).to(dtype)
"""

SUMS = """
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for size in (0, 1, 7, 4096, 16385, 16384 * count + 5, 262144 + 3, 700001):
        parts = [of_rank(other, size, dtype) for other in range(count)]
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        expected = expected.to(dtype)
        x = parts[rank].clone()
        assert all_reduce(x) is x
        wide = torch.zeros(size, 3, dtype=dtype)
        wide[:, 1] = parts[rank]
        all_reduce(wide[:, 1])
        for sums in (x, wide[:, 1]):
            if shares:
                assert torch.equal(sums, expected), (dtype, size)
            else:
                torch.testing.assert_close(sums, expected)
        assert not wide[:, ::2].any()
"""


def start(body: str, count: int, folder: Path, way: str = "shared") -> list[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK + body, str(rank), str(count), str(folder / "store"), way],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip


def ended(ranks: list[subprocess.Popen[str]], seconds: float = 120) -> list[tuple[int, str]]:
    """(exit status, stderr) of each."""
    try:
        return [(rank.wait(seconds), rank.communicate()[1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize(
    ("count", "way"),
    [
        (2, "shared"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [(3, "shared"), (4, "shared"), (2, "torch")]
        ),
    ],
)
def test_sums(count, way, tmp_path):
    """Of all sizes and dtypes, in the order of ranks, with the same bits on each; more ranks than CPUs, too."""
    shared_before = set(os.listdir("/dev/shm"))
    results = ended(start(SUMS, count, tmp_path, way))
    assert [status for status, _ in results] == [0] * count, results
    assert set(os.listdir("/dev/shm")) <= shared_before


def test_a_killed_rank_ends_the_wait_of_the_other(tmp_path):
    body = """
all_reduce(torch.ones(4))
if rank == 1:
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(600)
all_reduce(torch.ones(4))
"""
    first, second = start(body, 2, tmp_path)
    assert second.stderr is not None
    while second.stderr.readline() != "waiting\n":
        assert second.poll() is None
    time.sleep(0.5)  # the other waits by now, asleep
    assert first.poll() is None
    killed = time.monotonic()
    second.send_signal(signal.SIGKILL)  # and nobody has waited for it yet
    ((status, text),) = ended([first])
    assert time.monotonic() - killed < 60  # on a busy machine
    assert status == 1 and "the process of rank 1 has ended" in text, text
    second.wait()


def test_ranks_that_differ(tmp_path):
    results = ended(start("all_reduce(torch.ones(4 + rank))", 2, tmp_path))
    assert any("rank 0 sums 16 bytes, rank 1 20" in text for _, text in results), results


def test_a_group_without_memory():
    assert native.why_not() is None
    with pytest.raises(RuntimeError, match="group 12345 share no memory"):
        torch.ops.dlinfer_cpu.all_reduce.default(torch.ones(3), 12345)
