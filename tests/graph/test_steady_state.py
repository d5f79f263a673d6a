"""Cached decoding through torch.compile: the cache stays where it is, and changing sizes compile nothing."""

import gc
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.graph.report.report import reports

pytestmark = pytest.mark.slow

BLOCK, HEADS, KV_HEADS, SIZE = 16, 4, 2, 32


class DecodeStep(nn.Module):
    """One attention layer of a decoding step over a paged cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, (HEADS + 2 * KV_HEADS) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, 64)

    def forward(
        self,
        x: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        blocks: Tensor,
        lengths: Tensor,
        slots: Tensor,
        longest: int,
    ) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], -1, SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
        attended = ops.paged_decode_attention(
            q, k_cache, v_cache, blocks, BLOCK, lengths, lengths, longest, HEADS, KV_HEADS
        )
        return self.out(attended.reshape(x.shape[0], -1))


def inputs(sequences: int, longest: int, k_cache: Tensor, v_cache: Tensor) -> tuple:
    """A step of so many sequences, the first of which has ``longest`` tokens."""
    per_sequence = -(-longest // BLOCK)
    blocks = torch.arange(sequences * per_sequence).view(sequences, -1) % k_cache.shape[0]
    lengths = torch.arange(sequences) % longest + 1
    lengths[0] = longest
    last = lengths - 1
    slots = blocks[torch.arange(sequences), last // BLOCK] * BLOCK + last % BLOCK
    return torch.randn(sequences, 64), k_cache, v_cache, blocks, lengths, slots, longest


@torch.no_grad()
def test_a_thousand_steps_with_other_sizes_each_compile_once() -> None:
    torch._dynamo.reset()
    model, draw = DecodeStep(), random.Random(0)
    compiled = torch.compile(model, backend="dlinfer", dynamic=True, fullgraph=True)
    caches = [torch.randn(512, BLOCK, KV_HEADS, SIZE) for _ in range(2)]
    places = [cache.data_ptr() for cache in caches]
    compiled(*inputs(4, 40, *caches))
    warm = len(reports())
    for step in range(1000):
        given = inputs(draw.randrange(2, 9), draw.randrange(BLOCK + 1, 200), *caches)
        result = compiled(*given)
        if step % 50 == 0:
            torch.testing.assert_close(result, model(*given))
    assert len(reports()) == warm
    assert [cache.data_ptr() for cache in caches] == places


@torch.no_grad()
def test_a_compiled_step_needs_no_more_memory_than_an_eager_one() -> None:
    """The cache of 256 MiB would show: one copy of it is far more than the 32 MiB that are allowed.

    What counts is how far a step goes beyond what was resident just before: other tests' leavings, which the process
    or the system may give back at any time, do not.
    """
    status, peak = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not peak.exists():
        pytest.skip("this system does not report the peak memory of a process")
    torch._dynamo.reset()
    model = DecodeStep()
    compiled = torch.compile(model, backend="dlinfer", dynamic=True, fullgraph=True)
    caches = [torch.zeros(65536, BLOCK, KV_HEADS, SIZE // 1, dtype=torch.float32) for _ in range(2)]
    given = inputs(4, 40, *caches)

    def resident(what: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(what))
        return int(line.split()[1]) * 1024

    def grown_by(step) -> int:
        step(*given)  # compiles, touches what it needs
        gc.collect()
        peak.write_text("5")  # the peak is what is resident now
        before = resident("VmRSS")
        for _ in range(20):
            step(*given)
        return resident("VmHWM") - before

    ours, theirs = grown_by(compiled), grown_by(model)
    assert caches[0].nbytes == 256 * 2**20
    assert ours <= theirs + 32 * 2**20, (ours, theirs)
