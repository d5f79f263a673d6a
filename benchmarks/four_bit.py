"""Linear layers with a weight of 4 bits: at which share of a plain read of memory, and against a weight in bfloat16.

    python -m benchmarks.four_bit [--rows 1 8] [--shapes 896x896 ...] [--group 128] [--dtype bfloat16] [--threads 2]

Shapes are OUTxIN, by default those of Qwen2.5-0.5B, whose query, key and value are one layer, and so are gate and up.
Each candidate walks over so many different weights that none is still in a cache when its turn comes again, as when a
model runs. GB/s counts the bytes of words; a plain sum of the same words takes its turn in every round, with as many
threads. linear is dlinfer's for a weight in x's dtype, F.linear torch's: a ratio above 1 says how many times faster
4 bits are, with the 95 % interval of the median; rounded, how many times faster x is multiplied that is rounded to 8
bits (DLINFER_CPU_ACTIVATIONS=int8). "row 1" is the time against one row of x.

With --threads 1 seconds are those that the thread had a CPU for, so other load on the machine matters less.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import roofline, timing
from benchmarks.timing import interleave, publish, ratio
from dlinfer.vendor.cpu import native

SHAPES = ("1152x896", "896x896", "9728x896", "896x4864")
ROWS = (1, 2, 4, 8, 16, 64, 512)
BEYOND_CACHES = 100_000_000  # bytes of words


def over(weights: list[Tensor], linear: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """One call of ``linear`` a weight."""

    def walk() -> None:
        for weight in weights:
            linear(x, weight)

    return walk


def reading(words: Tensor, pool: ThreadPoolExecutor) -> Callable[[], None]:
    """Reads all of a tensor, a part a thread, the last one in the caller's."""
    read = roofline._library().read
    threads = torch.get_num_threads()
    share = words.nbytes // threads // 1024 * 1024

    def part(index: int) -> None:
        result = ctypes.c_float()
        read(ctypes.c_void_p(words.data_ptr() + index * share), ctypes.c_int64(share), ctypes.byref(result))

    def walk() -> None:
        others = [pool.submit(part, index) for index in range(threads - 1)]
        part(threads - 1)
        for other in others:
            other.result()

    return walk


def measure(
    shape: str, rows: int, chosen: argparse.Namespace, first: dict[str, float], pool: ThreadPoolExecutor
) -> dict[str, object]:
    """The row of the table for this shape and so many rows of x. first: seconds by shape, for one row."""
    dtype, group = getattr(torch, chosen.dtype), chosen.group
    out_features, in_features = map(int, shape.split("x"))
    one = out_features * in_features // 2
    count = max(1, BEYOND_CACHES // one)
    groups = -(-in_features // group)
    words = torch.randint(-(2**31), 2**31, (count, in_features, out_features // 8), dtype=torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (count, groups, out_features // 8), dtype=torch.int32)
    scales = torch.rand(count, groups, out_features).mul_(0.1).half()
    layers = list(zip(words, scales, zeros, strict=True))
    wide = [torch.randn(out_features, in_features).to(dtype) for _ in range(max(1, count // 2))]
    x = torch.randn(rows, in_features).to(dtype)

    def four_bits(kernel: Callable[..., Tensor]) -> Callable[[], None]:
        def walk() -> None:
            for weight, scale, zero in layers:
                kernel(x, weight, scale, zero, None, group)

        return walk

    samples = interleave(
        {
            "4 bits": four_bits(torch.ops.dlinfer_cpu.weight_quant_matmul.default),
            "rounded": four_bits(torch.ops.dlinfer_cpu.weight_quant_matmul_int8.default),
            "read": reading(words, pool),
            "linear": over(wide, torch.ops.dlinfer_cpu.linear.default, x),
            "F.linear": over(wide, functional.linear, x),
        },
        chosen.pairs,
    )
    for name in ("linear", "F.linear"):
        samples[name] = [seconds * count / len(wide) for seconds in samples[name]]
    seconds = statistics.median(samples["4 bits"]) / count
    first.setdefault(shape, seconds)
    return {
        "out x in": shape,
        "rows": rows,
        "us": seconds * 1e6,
        "GB/s": one / seconds / 1e9,
        "of a read": ratio(samples["read"], samples["4 bits"]),
        "vs linear": ratio(samples["linear"], samples["4 bits"]),
        "vs F.linear": ratio(samples["F.linear"], samples["4 bits"]),
        "rounded": ratio(samples["4 bits"], samples["rounded"]),
        f"row {chosen.rows[0]}": f"{seconds / first[shape]:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTxIN")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--group", type=int, default=128, help="rows of the weight with one scale")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=9, help="rounds that are timed")
    chosen = parser.parse_args()

    reason = native.why_not()
    if reason:
        parser.exit(1, f"dlinfer's kernels are not available: {reason}\n")
    torch.set_num_threads(chosen.threads)
    clock = time.thread_time if chosen.threads == 1 else time.perf_counter
    first: dict[str, float] = {}
    with (
        torch.inference_mode(),
        ThreadPoolExecutor(chosen.threads) as pool,
        mock.patch.object(timing.time, "perf_counter", clock),
    ):
        rows = [
            measure(shape, count, chosen, first, pool) for count in chosen.rows for shape in chosen.shapes
        ]
    publish(f"linear of 4 bits, x in {chosen.dtype}", rows)


if __name__ == "__main__":
    main()
