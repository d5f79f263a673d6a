"""Attention: dlinfer's C++ kernels against its path over torch's flash kernel, which takes copies of pages.

    python -m benchmarks.attention [--work prefill-512 ragged ...] [--dtype bfloat16 float32] [--threads 2]
                                   [--heads 14] [--kv-heads 2] [--size 64] [--pairs 15]

By default the heads of Qwen2.5-0.5B. prefill-N is one sequence of N tokens, ragged 8 of 50 to 500, chunk 512 queries
behind 3584 keys in pages; decode-bB-N is a step of B sequences with N keys each, for which each candidate walks over
so many caches that none is still in the processor's when its turn comes again. A ratio above 1 says how many times
faster dlinfer is, with the 95 % interval of the median. CPU us are those of all threads together, which other load on
the machine does not count into; the rates are by them, a thread, and the share is that of the fastest time which
multiplications and reading memory allow, both as measured in the same rounds (benchmarks/roofline.py).
"""

import argparse
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import roofline
from benchmarks.timing import interleave, publish, ratio
from dlinfer.ops.attention.semantics import Scoring
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.attention.gathered_decode import gathered_decode
from dlinfer.vendor.cpu.attention.kv_cache import Pages
from dlinfer.vendor.cpu.attention.piecewise_prefill import (
    piecewise_paged_prefill,
    piecewise_prefill,
)

BLOCK = 64
BEYOND_CACHES = 100_000_000  # bytes
LEAST_WORK = 1e9  # multiplications and additions of a sample, so that it takes some milliseconds
RAGGED = (50, 500, 120, 333, 64, 211, 450, 87)
WORK: dict[str, tuple[tuple[int, int], ...]] = {
    "prefill-128": ((128, 128),),
    "prefill-512": ((512, 512),),
    "prefill-2048": ((2048, 2048),),
    "ragged": tuple((n, n) for n in RAGGED),
    "chunk": ((512, 4096),),
    **{f"decode-b{b}-{n}": ((1, n),) * b for b in (1, 8) for n in (512, 2048)},
    "decode-b1-8192": ((1, 8192),),
    "decode-b32-512": ((1, 512),) * 32,
}
"""(queries, keys) of each sequence."""


class Heads(NamedTuple):
    """Of queries, of keys, and the numbers of one."""

    queries: int
    keys: int
    size: int


class Inputs:
    """One batch: its tokens, and where they stand in pages."""

    def __init__(self, work: str, heads: Heads, dtype: torch.dtype):
        lengths = WORK[work]
        self.decode, self.paged = work.startswith("decode"), work.startswith(("decode", "chunk"))
        tokens, keys = (sum(one[i] for one in lengths) for i in (0, 1))
        self.q = torch.randn(tokens, heads.queries, heads.size).to(dtype)
        self.ends = torch.tensor([one[0] for one in lengths]).cumsum(0)
        self.kv_lens = torch.tensor([one[1] for one in lengths])
        columns = -(-max(one[1] for one in lengths) // BLOCK)
        self.pages = torch.randperm(columns * len(lengths)).view(len(lengths), columns)
        shape = (len(self.pages.flatten()), BLOCK) if self.paged else (keys,)
        self.k, self.v = (torch.randn(*shape, heads.keys, heads.size).to(dtype) for _ in range(2))
        self.out = torch.empty_like(self.q)
        self.sizes, self.scale = (heads.queries, heads.keys), heads.size**-0.5
        pairs = sum(q * k - q * (q - 1) // 2 for q, k in lengths)
        self.flops = pairs * heads.queries * heads.size * 4
        self.bytes = (keys * heads.keys + tokens * heads.queries) * heads.size * dtype.itemsize * 2

    def ours(self) -> None:
        """By C++."""
        op = torch.ops.dlinfer_cpu
        rules = (self.scale, True, -1, -1, 0.0, None, None)
        if self.decode:
            given = (self.q, self.k, self.v, self.pages, self.kv_lens, self.out)
            op.paged_decode_attention.default(*given, self.scale, -1, 0.0, None, None)
        elif self.paged:
            given = (self.q, self.k, self.v, self.pages, self.ends, self.kv_lens, self.out)
            op.paged_prefill_attention.default(*given, *rules)
        else:
            given = (self.q, self.k, self.v, self.ends, self.kv_lens, self.out)
            op.prefill_attention.default(*given, *rules)

    def torch(self) -> None:
        """By torch, as where C++ cannot be had."""
        rules = Scoring(self.scale, True, -1, -1, 0.0, None, None)
        caches = (Pages(self.k), Pages(self.v))
        if self.decode:
            given = (self.q, caches, self.pages, self.kv_lens, *self.sizes, self.out)
            gathered_decode(*given, self.scale, -1, 0.0, None, None)
        elif self.paged:
            piecewise_paged_prefill(self.q, caches, self.pages, self.ends, self.kv_lens, self.out, rules)
        else:
            piecewise_prefill(self.q, self.k, self.v, self.ends, self.kv_lens, self.out, rules)


def measure(work: str, heads: Heads, dtype: torch.dtype, pairs: int) -> dict[str, object]:
    """The row of the table for one kind of work."""
    first = Inputs(work, heads, dtype)
    count = -(-BEYOND_CACHES // first.bytes) if first.decode else max(1, round(LEAST_WORK / first.flops))
    inputs = [first, *(Inputs(work, heads, dtype) for _ in range(count - 1))]
    rates: dict[str, list[float]] = {"flops": [], "bytes": []}
    cpu: list[float] = []

    def ours() -> None:
        start = time.process_time()
        for one in inputs:
            one.ours()
        cpu.append((time.process_time() - start) / count)

    def by_torch() -> None:
        for one in inputs:
            one.torch()

    def roof() -> None:
        rates["flops"].append(roofline.flops(dtype))
        rates["bytes"].append(roofline.bandwidth())

    samples = interleave({"dlinfer": ours, "torch": by_torch, "roof": roof}, pairs)
    seconds = {name: statistics.median(samples[name]) / count for name in ("dlinfer", "torch")}
    busy = statistics.median(cpu)
    least = max(
        first.flops / statistics.median(rates["flops"]), first.bytes / statistics.median(rates["bytes"])
    )
    return {
        "work": work,
        "dtype": str(dtype).removeprefix("torch."),
        "dlinfer us": seconds["dlinfer"] * 1e6,
        "torch us": seconds["torch"] * 1e6,
        "CPU us": busy * 1e6,
        "GFLOP/s": first.flops / busy / 1e9,
        "GB/s": first.bytes / busy / 1e9,
        "share of roof %": 100 * least / busy,
        "vs torch": ratio(samples["torch"], samples["dlinfer"]),
    }


def right(work: str, heads: Heads, dtype: torch.dtype) -> bool:
    """Whether both candidates give about the same, so that it is the same work that is timed."""
    one = Inputs(work, heads, dtype)
    one.ours()
    ours: Tensor = one.out.clone()
    one.torch()
    return torch.allclose(ours.float(), one.out.float(), rtol=2e-2, atol=2e-2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=list(WORK), metavar="WORK")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16", "float32"],
        choices=["bfloat16", "float16", "float32"],
    )
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=64, help="numbers of a head")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=15, help="rounds that are timed")
    chosen = parser.parse_args()

    reason = native.why_not()
    if reason:
        parser.exit(1, f"dlinfer's kernels are not available: {reason}\n")
    torch.set_num_threads(chosen.threads)
    heads, rows = Heads(chosen.heads, chosen.kv_heads, chosen.size), []
    with torch.inference_mode():
        for name in chosen.dtype:
            for work in chosen.work:
                dtype = getattr(torch, name)
                if not right(work, heads, dtype):
                    parser.exit(1, f"{work} in {name}: the two results differ\n")
                rows.append(measure(work, heads, dtype, chosen.pairs))
    publish(f"attention {heads.queries}/{heads.keys} heads of {heads.size}", rows)


if __name__ == "__main__":
    main()
