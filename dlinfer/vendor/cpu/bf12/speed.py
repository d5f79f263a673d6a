"""Measures whether this CPU multiplies faster by weights in BF12 than by plain weights in bfloat16.

A decoding step reads each weight once. BF12 has three quarters of the bytes, but takes time to unpack. So it depends on
the CPU, and on the number of rows, which of the two is faster. Their products are equal, bit for bit.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.cpu import native

logger = logging.getLogger("dlinfer")

_ROWS = (1, 2, 4, 8, 16, 32)
# 128 MiB. A larger cache holds them, and then BF12 looks slower than it is with weights from memory.
_OUT, _IN, _MATRICES = 4096, 1024, 16
_WALKS = 5
_WORTHWHILE = 1.05
"""How many times faster BF12 has to be. Less could be an error of the measurement."""


def speedups(most_rows: int) -> dict[int, float]:
    """Measure for up to two seconds. Return a dict: number of rows -> how many times faster BF12 is.

    It took 0.5 s with AMX and 1.9 s with AVX2, on two cores. The dict is empty without the C++ kernels. most_rows: the
    largest number of rows, at least 1.
    """
    if native.why_not():
        return {}
    with torch.inference_mode():
        plain = [torch.randn(_OUT, _IN, dtype=torch.bfloat16)]
        packed = [torch.ops.dlinfer_cpu.pack_bf12.default(plain[0])]
        plain += [plain[0].clone() for _ in range(_MATRICES - 1)]
        packed += [packed[0].clone() for _ in range(_MATRICES - 1)]
        return {rows: _speedup(rows, plain, packed) for rows in _ROWS if rows <= most_rows}


def shown(measured: Mapping[Any, float]) -> str:
    """Return the result of ``speedups`` as text."""
    return ", ".join(f"{speedup:.2f} with {rows}" for rows, speedup in measured.items())


def _speedup(rows: int, plain: list[Tensor], packed: list[Tensor]) -> float:
    x = torch.randn(rows, _IN, dtype=torch.bfloat16)
    linear, linear_bf12 = torch.ops.dlinfer_cpu.linear.default, torch.ops.dlinfer_cpu.linear_bf12.default
    seconds = [
        (
            _seconds(lambda: [linear(x, weight) for weight in plain]),
            _seconds(lambda: [linear_bf12(x, weight, None, _OUT) for weight in packed]),
        )
        for _ in range(_WALKS)
    ]
    return min(first for first, _ in seconds) / min(second for _, second in seconds)


def _seconds(walk: Callable[[], object]) -> float:
    begin = time.perf_counter()
    walk()
    return time.perf_counter() - begin


@functools.cache
def is_faster(most_rows: int, threads: int) -> bool:
    """Return whether BF12 is faster on average over 1 to ``most_rows`` rows, with torch's number of threads."""
    measured = speedups(most_rows)
    if not measured:
        return False
    faster = math.exp(sum(map(math.log, measured.values())) / len(measured)) > _WORTHWHILE
    logger.info(
        "DLINFER_CPU_WEIGHTS=auto: weights are %s. Times as fast in 12 bits, by rows: %s",
        "packed in 12 bits (bf12)" if faster else "kept in bfloat16",
        shown(measured),
    )
    return faster
