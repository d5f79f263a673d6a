"""Linear layers: dlinfer's kernels, for few rows and for many, against F.linear and against oneDNN's prepacked weights.

In bfloat16 also dlinfer's with the weight in 12 bits a number, and how many times faster than with the plain weight.

    python -m benchmarks.linear [--rows 1 8] [--dtype bfloat16] [--shapes 896x896 ...] [--pairs 15] [--alone]

Shapes are OUTxIN, by default those of Qwen2.5-0.5B. Each candidate walks over so many different weights that none is
still in a cache when its turn comes again, as when a model runs. GB/s counts the bytes of the plain weights. A ratio
above 1 says how many times faster dlinfer is, with the 95 % interval of the median. The share of the roof is the time
that multiplications and reading the weight take at least (benchmarks/roofline.py), of the time that it took. --alone
leaves torch's candidates out, and measures the roof afterwards: torch's threads look for work for some time after a
product, and so take a CPU from whoever comes next.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import roofline
from benchmarks.timing import interleave, publish, ratio
from dlinfer.vendor.cpu import native

SHAPES = ("1152x896", "896x896", "9728x896", "896x4864", "151936x896")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
OURS, IN_12_BITS = "dlinfer", "in 12 bits"
BEYOND_CACHES = 200_000_000  # bytes


def over(weights: list[Tensor], linear: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """One call of ``linear`` a weight."""

    def walk() -> None:
        for weight in weights:
            linear(weight)

    return walk


def measure(shape: str, rows: int, dtype: torch.dtype, pairs: int, alone: bool) -> dict[str, object]:
    """The row of the table for a weight of this shape and an x of so many rows."""
    out_features, in_features = map(int, shape.split("x"))
    one = out_features * in_features * dtype.itemsize
    count = max(1, BEYOND_CACHES // one)
    weights = [torch.randn(out_features, in_features, dtype=dtype) for _ in range(count)]
    x = torch.randn(rows, in_features, dtype=dtype)
    read = {OURS: one}
    candidates = {OURS: over(weights, lambda weight: torch.ops.dlinfer_cpu.linear.default(x, weight))}
    if dtype is torch.bfloat16:
        product = torch.ops.dlinfer_cpu.linear_bf12.default
        in_12_bits = [torch.ops.dlinfer_cpu.pack_bf12.default(weight) for weight in weights]
        read[IN_12_BITS] = in_12_bits[0].nbytes
        candidates[IN_12_BITS] = over(in_12_bits, lambda weight: product(x, weight, None, out_features))
    if not alone:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
        prepacked = torch.ops.mkldnn._linear_pointwise.default
        candidates["F.linear"] = over(weights, lambda weight: functional.linear(x, weight))
        candidates["prepacked"] = over(packed, lambda weight: prepacked(x, weight, None, "none", [], ""))
    rates: dict[str, list[float]] = {"flops": [], "bytes": []}

    threads = torch.get_num_threads()

    def roof() -> None:
        rates["flops"].append(threads * roofline.flops(dtype))
        rates["bytes"].append(threads * roofline.bandwidth())

    if alone:  # torch's threads, which the roof uses, must not wait beside the candidates
        samples = interleave(candidates, pairs)
        interleave({"roof": roof}, pairs)
    else:
        samples = interleave(candidates | {"roof": roof}, pairs)
    seconds = {name: statistics.median(samples[name]) / count for name in candidates}
    row: dict[str, object] = {"out x in": shape, "rows": rows}
    row |= {f"{name} GB/s": one / taken / 1e9 for name, taken in seconds.items()}
    computing = 2 * rows * out_features * in_features / statistics.median(rates["flops"])
    for name, size in read.items():
        least = max(computing, size / statistics.median(rates["bytes"]))
        row[f"{name} share of roof %"] = 100 * least / seconds[name]
    row |= {f"vs {name}": ratio(samples[name], samples[OURS]) for name in candidates if name not in read}
    if IN_12_BITS in candidates:
        row["12 bits vs plain"] = ratio(samples[OURS], samples[IN_12_BITS])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTxIN")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--pairs", type=int, default=15, help="rounds that are timed")
    parser.add_argument("--alone", action="store_true", help="dlinfer's kernels only")
    chosen = parser.parse_args()

    reason = native.why_not()
    if reason:
        parser.exit(1, f"dlinfer's kernels are not available: {reason}\n")
    dtype = getattr(torch, chosen.dtype)
    with torch.inference_mode():
        rows = [
            measure(shape, count, dtype, chosen.pairs, chosen.alone)
            for count in chosen.rows
            for shape in chosen.shapes
        ]
    publish(f"linear {chosen.dtype}", rows)


if __name__ == "__main__":
    main()
