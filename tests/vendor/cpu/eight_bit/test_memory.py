"""No float copy of a whole weight is made: what a call needs at most, beside what there was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlinfer import ops

FP8 = torch.float8_e4m3fn
ROWS, COLUMNS = 12288, 4096
WEIGHT = ROWS * COLUMNS  # bytes, 48 MiB; in float32 it has 192
PEAK = Path("/proc/self/clear_refs")


def peak(call: Callable[[], Tensor]) -> int:
    """Bytes by which a call makes the process larger than it was, at most."""
    call()  # what is kept for later calls
    try:
        PEAK.write_text("5")
    except OSError:
        pytest.skip("the system does not let a process forget its peak")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name + ":")).split()[1]) * 1024


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_linear_layer(tokens):
    numbers = torch.ones(ROWS, COLUMNS, dtype=torch.int8)
    x, row = torch.ones(tokens, COLUMNS, dtype=torch.bfloat16), torch.ones(ROWS)
    few, scale = ops.dynamic_quant(x, torch.int8)
    blocks = torch.ones(ROWS // 128, COLUMNS // 128)
    # oneDNN may lay the numbers out anew for many tokens, in 8 bits: those of a piece at a time
    int8 = peak(lambda: ops.linear_w8a8(few, numbers, scale, row, torch.bfloat16, torch.int8, None))
    assert int8 < WEIGHT // 2
    fp8 = numbers.view(FP8)
    assert peak(lambda: ops.linear_blocked_fp8(x, fp8, blocks, None, 128, False)) < WEIGHT
    assert peak(lambda: ops.linear_static_fp8(x, fp8, row, torch.ones(1), None)) < WEIGHT
    few, scale = ops.dynamic_quant(x, FP8)
    assert peak(lambda: ops.linear_w8a8(few, fp8, scale, row, torch.bfloat16, FP8, None)) < WEIGHT


def test_sums_of_many_tokens_are_not_held_for_a_whole_result():
    rows, columns, tokens = 4096, 256, 4096
    numbers, row = torch.ones(rows, columns, dtype=torch.int8), torch.ones(rows)
    few, scale = ops.dynamic_quant(torch.ones(tokens, columns, dtype=torch.bfloat16), torch.int8)
    out = tokens * rows * 2  # 32 MiB; its sums would take 64 as integers, and 64 as floats
    assert peak(lambda: ops.linear_w8a8(few, numbers, scale, row, torch.bfloat16, torch.int8, None)) < 2 * out
