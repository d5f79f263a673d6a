"""torch.compile(backend="dlinfer") against inductor with freezing, on transformers' own model with a static cache.

    python -m benchmarks.graph_backend [--pairs 15] [--compilations 15] [--dtype bfloat16 | float32] [--model FOLDER]

Prints median ratios with their 95 % interval for cached decoding and a prefill of 512 tokens, peak RSS, and then the
seconds of compiling both in a process with empty caches, for which each pair takes two minutes. 0 leaves a part out.
The last line of each part is JSON.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arena import Child, Entry, measure
from benchmarks.models import add_model_options, chosen_model
from benchmarks.serving import rows_of
from benchmarks.timing import publish, ratio

KINDS = ["hf-dlinfer", "hf-inductor-freezing", "hf-eager"]
ORDERS: list[dict[str, Any]] = [
    {"work": "decode", "batch": 1, "length": 8, "tokens": 24},
    {"work": "decode", "batch": 8, "length": 8, "tokens": 12},
    {"work": "prefill", "batch": 1, "length": 512, "tokens": 1},
]


def compile_seconds(kind: str, model: Path) -> float:
    """Seconds of a first prefill and a first decoding step with nothing cached, less those of a second.

    Of 16 tokens: what is compiled is the same as for 512, and what is subtracted is small.
    """
    with tempfile.TemporaryDirectory() as empty:
        os.environ |= {
            "DLINFER_CACHE_DIR": f"{empty}/dlinfer",
            "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor",
        }
        try:
            with Child(Entry(kind, kind, model)) as child:
                total = 0.0
                for work in ("prefill", "decode"):
                    order = {"work": work, "batch": 1, "length": 16, "tokens": 1}
                    total += child.run(**order)["seconds"] - child.run(**order)["seconds"]
                return total
        finally:
            del os.environ["DLINFER_CACHE_DIR"], os.environ["TORCHINDUCTOR_CACHE_DIR"]


def compare_speed(model: Path, pairs: int) -> None:
    _, results = measure([Entry(kind, kind, model) for kind in KINDS], ORDERS, pairs)
    publish(
        f"torch.compile on transformers' model, {model.name}", rows_of(KINDS, ORDERS, results, "hf-dlinfer")
    )


def compare_compilation(model: Path, pairs: int) -> None:
    ours, peer = KINDS[:2]
    seconds: dict[str, list[float]] = {ours: [], peer: []}
    for turn in range(pairs):
        for kind in (ours, peer) if turn % 2 == 0 else (peer, ours):
            seconds[kind].append(compile_seconds(kind, model))
        latest = ", ".join(f"{kind} {values[-1]:.1f} s" for kind, values in seconds.items())
        print(f"compiling: round {turn + 1} of {pairs}: {latest}", file=sys.stderr, flush=True)
    row = {
        "ours s": statistics.median(seconds[ours]),
        "inductor freezing s": statistics.median(seconds[peer]),
        "times faster": ratio(seconds[peer], seconds[ours]),
    }
    publish(f"compiling prefill and decoding, nothing cached, {model.name}", [row])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--compilations", type=int, default=15)
    add_model_options(parser)
    args = parser.parse_args()
    model = chosen_model(args)
    if args.pairs:
        compare_speed(model, args.pairs)
    if args.compilations:
        compare_compilation(model, args.compilations)


if __name__ == "__main__":
    main()
