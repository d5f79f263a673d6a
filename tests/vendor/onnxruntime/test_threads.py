"""Threads: one compiled region serves many at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from tests.vendor.onnxruntime.regions import compiled

THREADS, CALLS = 8, 25


@pytest.mark.parametrize("weights", ["shared", "constant"])
def test_threads_with_their_own_caches_get_their_own_results(weights):
    weight = torch.randn(8, 8)

    def function(cache, x, weight, at):
        cache.index_copy_(0, at, F.linear(x, weight))
        return cache.cumsum(0)

    def make(seed, rows):
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(16, 8, generator=rng), torch.randn(rows, 8, generator=rng), torch.arange(rows)

    cache, x, at = make(0, 3)
    run = compiled(function, cache, x, weight, at, static=(2,), weights=weights).run

    def work(thread: int) -> bool:
        for call in range(CALLS):
            ours, x, at = make(thread * CALLS + call, 2 + call % 5)
            theirs = ours.clone()
            (given,) = run(ours, x, weight, at)
            expected = function(theirs, x, weight, at)
            if not torch.allclose(given, expected, atol=1e-4) or not torch.allclose(ours, theirs, atol=1e-5):
                return False
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS)))
