"""LMDeploy on the CPU with DLINFER_CPU_WEIGHTS, in turns: one checkpoint as it is stored, in 12 bits, in int8,
and in int4.

    python -m benchmarks.packed_weights [--pairs 9] [--eager] [--kinds stored bf12 int8 int4] [--model FOLDER]

int4-kept keeps the output projection as it is stored (DLINFER_CPU_HEAD=kept). Prints tokens per second, and median
ratios against the first kind with their 95 % interval; then seconds of loading; the last line is JSON.
"""

import argparse
import statistics
from typing import Any

from benchmarks.arena import Entry, measure
from benchmarks.models import add_model_options, chosen_model
from benchmarks.timing import publish, ratio

KINDS: dict[str, dict[str, str]] = {
    "stored": {"DLINFER_CPU_WEIGHTS": "kept"},
    "bf12": {"DLINFER_CPU_WEIGHTS": "bf12"},
    "int8": {"DLINFER_CPU_WEIGHTS": "int8"},
    "int8-kept": {"DLINFER_CPU_WEIGHTS": "int8", "DLINFER_CPU_HEAD": "kept"},
    "int4": {"DLINFER_CPU_WEIGHTS": "int4"},
    "int4-kept": {"DLINFER_CPU_WEIGHTS": "int4", "DLINFER_CPU_HEAD": "kept"},
}
ORDERS: list[dict[str, Any]] = [
    {"work": "decode", "batch": 1, "length": 8, "tokens": 24},
    {"work": "prefill", "batch": 1, "length": 512, "tokens": 1},
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["stored", "bf12", "int8", "int4", "int4-kept"]
    )
    add_model_options(parser)
    args = parser.parse_args()
    model, mode = chosen_model(args), "lmdeploy-eager" if args.eager else "lmdeploy-graph"
    options = {"dtype": args.dtype}
    entries = [Entry(kind, mode, model, options, environment=KINDS[kind]) for kind in args.kinds]
    loads, results = measure(entries, ORDERS, args.pairs)
    rows: list[dict[str, Any]] = []
    first = args.kinds[0]
    for order, answers in zip(ORDERS, results, strict=True):
        count = order["length"] if order["work"] == "prefill" else order["tokens"]
        seconds = {kind: [answer["seconds"] for answer in answers[kind]] for kind in args.kinds}
        for kind in args.kinds:
            row = {"work": f"{order['work']} batch 1 x {order['length']}", "weights": kind}
            row["tok/s"] = count / statistics.median(seconds[kind])
            row[f"times {first}"] = ratio(seconds[first], seconds[kind]) if kind != first else "1"
            row["peak GiB"] = round(max(answer["rss"] for answer in answers[kind]) / 2**30, 2)
            rows.append(row | {"start s": round(loads[kind], 1)})
    publish(f"{mode}, {model.name}", rows)


if __name__ == "__main__":
    main()
