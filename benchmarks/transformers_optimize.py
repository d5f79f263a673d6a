"""dlinfer.transformers.optimize, with dlinfer's attention, against transformers' own model, eager and compiled.

    python -m benchmarks.transformers_optimize [--pairs 15] [--dtype bfloat16 | float32] [--model FOLDER]

Prints median ratios with their 95 % interval for decoding behind 512 tokens and for a prefill of 512 tokens, and peak
RSS. The last line is JSON.
"""

import argparse
from typing import Any

from benchmarks.arena import Entry, measure
from benchmarks.models import add_model_options, chosen_model
from benchmarks.serving import rows_of
from benchmarks.timing import publish

KINDS = ["hf-optimized", "hf-eager", "hf-optimized-dlinfer", "hf-inductor-freezing"]
ORDERS: list[dict[str, Any]] = [
    {"work": "decode", "batch": 1, "length": 512, "tokens": 16},
    {"work": "prefill", "batch": 1, "length": 512, "tokens": 1},
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="the first is compared with the others"
    )
    add_model_options(parser)
    args = parser.parse_args()
    model = chosen_model(args)
    _, results = measure([Entry(kind, kind, model) for kind in args.kinds], ORDERS, args.pairs)
    rows = rows_of(args.kinds, ORDERS, results, args.kinds[0])
    publish(f"transformers on dlinfer's ops, {model.name}", rows)


if __name__ == "__main__":
    main()
