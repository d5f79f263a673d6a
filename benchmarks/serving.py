"""LMDeploy in graph mode against its eager mode, and transformers eager, on the shape of Qwen2.5-0.5B.

    python -m benchmarks.serving [--pairs 15] [--dtype bfloat16 | float32] [--model FOLDER]

Prints tokens per second, median ratios with their 95 % interval, peak RSS and start-up; the last line is JSON.
"""

import argparse
import statistics
from typing import Any

from benchmarks.arena import Child, Entry, measure
from benchmarks.models import add_model_options, chosen_model
from benchmarks.timing import publish, ratio

KINDS = ["lmdeploy-graph", "lmdeploy-eager", "hf-eager"]
ORDERS: list[dict[str, Any]] = [
    {"work": "decode", "batch": 1, "length": 8, "tokens": 24},
    {"work": "decode", "batch": 8, "length": 8, "tokens": 12},
    {"work": "prefill", "batch": 1, "length": 512, "tokens": 1},
]


def rows_of(
    kinds: list[str], orders: list[dict[str, Any]], results: list[Any], ours: str
) -> list[dict[str, Any]]:
    """A row for each order and peer: rates, how many times faster ``ours`` is, and peak memory."""
    rows = []
    for order, answers in zip(orders, results, strict=True):
        count = order["batch"] * (order["length"] if order["work"] == "prefill" else order["tokens"])
        seconds = {kind: [answer["seconds"] for answer in answers[kind]] for kind in kinds}
        rate = {kind: count / statistics.median(values) for kind, values in seconds.items()}
        peak = {kind: statistics.median(answer["rss"] for answer in answers[kind]) / 2**30 for kind in kinds}
        for peer in kinds:
            if peer == ours:
                continue
            rows.append(
                {
                    "work": f"{order['work']} batch {order['batch']} x {order['length']}",
                    "peer": peer,
                    "ours tok/s": rate[ours],
                    "peer tok/s": rate[peer],
                    "times faster": ratio(seconds[peer], seconds[ours]),
                    "our peak GiB": round(peak[ours], 2),
                    "peer peak GiB": round(peak[peer], 2),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--starts", type=int, default=3)
    add_model_options(parser)
    args = parser.parse_args()
    model = chosen_model(args)
    entries = [Entry(kind, kind, model) for kind in KINDS]
    _, results = measure(entries, ORDERS, args.pairs)
    publish(f"LMDeploy in graph mode, {model.name}", rows_of(KINDS, ORDERS, results, "lmdeploy-graph"))
    starts: dict[str, list[float]] = {kind: [] for kind in KINDS[:2]}
    for _ in range(args.starts):  # the cache is warm by now
        for entry in entries[:2]:
            with Child(entry) as child:
                starts[entry.name].append(child.load)
    publish(
        "start-up with a warm cache",
        [
            {
                "graph s": statistics.median(starts["lmdeploy-graph"]),
                "eager s": statistics.median(starts["lmdeploy-eager"]),
                "graph adds s": statistics.median(
                    g - e for g, e in zip(starts["lmdeploy-graph"], starts["lmdeploy-eager"], strict=True)
                ),
            }
        ],
    )


if __name__ == "__main__":
    main()
