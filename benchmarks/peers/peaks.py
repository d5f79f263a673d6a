"""What the machine can do in these minutes: bytes read and numbers multiplied in a second."""

import statistics
import time
from collections.abc import Callable

import torch


def read_bandwidth() -> float:
    """Bytes per second that all threads of torch together read from memory: the sum of one GiB."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    return data.numel() * 8 / _seconds(data.sum)


def bfloat16_peak() -> float:
    """Floating-point operations per second of torch's product of bfloat16 matrices, at a size that suits it."""
    rows, inner, columns = 1024, 1024, 4096
    a = torch.randn(rows, inner).bfloat16()
    b = torch.randn(inner, columns).bfloat16()
    return 2 * rows * inner * columns / _seconds(lambda: torch.mm(a, b))


def _seconds(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(12):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])
