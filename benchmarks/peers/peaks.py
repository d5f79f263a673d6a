"""What the machine can do in these minutes: bytes read and numbers multiplied in a second."""

import statistics
import time
from collections.abc import Callable

import torch


def read_bandwidth() -> float:
    """Bytes per second that all threads of torch together read from memory: the sum of one GiB."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    return data.numel() * 8 / _seconds(data.sum)


def product_peak() -> tuple[str, float]:
    """The dtype of torch's fastest product of matrices, and its floating-point operations per second.

    It is bfloat16 where the processor has instructions that torch's takes; elsewhere that one is its reference, which
    takes hundreds of times as long as float32.
    """
    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    rows, inner, columns = 1024, 1024, 4096
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    return str(dtype).removeprefix("torch."), 2 * rows * inner * columns / _seconds(lambda: torch.mm(a, b))


def _seconds(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(12):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])
