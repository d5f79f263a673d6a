"""Mixture of experts: dlinfer's kernel against torch's loop over the chosen experts, and its grouped product.

    python -m benchmarks.moe [--tokens 1 8] [--dtype bfloat16] [--hidden 1024] [--intermediate 512] [--experts 32]
                             [--topk 4] [--pairs 15]

By default the layers of a small Qwen-MoE. Each candidate walks over so many layers that none of their weights is still
in a cache when its turn comes again, as when a model runs. GB/s counts the bytes of the chosen experts' weights, once;
GFLOP/s the products of all choices. A ratio above 1 says how many times faster dlinfer is, with the 95 % interval of
the median.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.timing import interleave, publish, ratio
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.moe import by_torch

TOKENS = (1, 4, 8, 32, 128, 512)
BEYOND_CACHES = 200_000_000  # bytes of chosen experts


def looped(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, renormalize: bool
) -> Tensor:
    """As transformers' modules do it: the tokens of one expert after those of another, by torch's linear layers."""
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, choice = torch.where(ids == expert)
        gate, up = functional.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, token, (result * weights[token, choice, None]).to(x.dtype))
    return out


def measure(tokens: int, chosen: argparse.Namespace) -> dict[str, object]:
    """The row of the table for so many tokens, whose experts are drawn evenly."""
    dtype = getattr(torch, chosen.dtype)
    x = torch.randn(tokens, chosen.hidden, dtype=dtype)
    weights, ids = torch.randn(tokens, chosen.experts).softmax(-1).topk(chosen.topk)
    one_expert = 3 * chosen.hidden * chosen.intermediate * dtype.itemsize
    read = one_expert * ids.unique().numel()
    layers = [
        (
            torch.randn(chosen.experts, 2 * chosen.intermediate, chosen.hidden, dtype=dtype)
            .mul_(chosen.hidden**-0.5),
            torch.randn(chosen.experts, chosen.hidden, chosen.intermediate, dtype=dtype)
            .mul_(chosen.intermediate**-0.5),
        )
        for _ in range(max(1, min(BEYOND_CACHES // read, 8)))
    ]  # fmt: skip

    def over(kernel: Callable[..., Tensor]) -> Callable[[], None]:
        def walk() -> None:
            for gate_up, down in layers:
                kernel(x, gate_up, down, weights, ids, True)

        return walk

    def grouped(
        x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, renorm: bool
    ) -> Tensor:
        return by_torch(x, (gate_up, down), weights, ids, renorm)

    candidates = {"dlinfer": torch.ops.dlinfer_cpu.fused_moe.default, "loop": looped, "grouped": grouped}
    samples = interleave({name: over(kernel) for name, kernel in candidates.items()}, chosen.pairs)
    seconds = {name: statistics.median(of_one) / len(layers) for name, of_one in samples.items()}
    return {
        "tokens": tokens,
        "experts": ids.unique().numel(),
        **{f"{name} us": 1e6 * s for name, s in seconds.items()},
        **{f"{name} GB/s": read / seconds[name] / 1e9 for name in ("dlinfer", "loop")},
        "dlinfer GFLOP/s": 2 * tokens * chosen.topk * one_expert / dtype.itemsize / seconds["dlinfer"] / 1e9,
        "vs loop": ratio(samples["loop"], samples["dlinfer"]),
        "vs grouped": ratio(samples["grouped"], samples["dlinfer"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=15, help="rounds that are timed")
    chosen = parser.parse_args()

    reason = native.why_not()
    if reason:
        parser.exit(1, f"dlinfer's kernels are not available: {reason}\n")
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = [measure(tokens, chosen) for tokens in chosen.tokens]
    publish(
        f"experts {chosen.dtype} {chosen.hidden}x{chosen.intermediate}, {chosen.topk} of {chosen.experts}",
        rows,
    )


if __name__ == "__main__":
    main()
