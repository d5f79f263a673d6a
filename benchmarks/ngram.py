"""Decoding with drafts that are looked up in the text, against decoding without, in LMDeploy's engine.

    python -m benchmarks.ngram [--drafts 7] [--batches 1 4] [--tokens 128] [--pairs 9] [--model FOLDER]

Greedy text of random weights soon repeats itself, and stands for an answer that quotes its prompt. Tokens drawn at a
temperature of 2 do not repeat. "times faster" is the median of the rounds' ratios, with its 95 % interval. The last
line is JSON.
"""

import argparse
import statistics
from typing import Any

from benchmarks.arena import Entry, measure
from benchmarks.models import add_model_options, chosen_model
from benchmarks.timing import publish, ratio

WORKS = {"repeating": "decode", "not repeating": "draw"}
PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafts", type=int, default=7, help="num_speculative_tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--eager", action="store_true", help="eager mode instead of graphs")
    add_model_options(parser)
    args = parser.parse_args()
    model, kind = chosen_model(args), "lmdeploy-eager" if args.eager else "lmdeploy-graph"
    entries = [
        Entry(name, kind, model, {"dtype": args.dtype, "drafts": drafts})
        for name, drafts in (("without", 0), ("with", args.drafts))
    ]
    orders: list[dict[str, Any]] = [
        {"work": work, "batch": batch, "length": PROMPT, "tokens": args.tokens}
        for batch in args.batches
        for work in WORKS.values()
    ]
    _, results = measure(entries, orders, args.pairs)
    texts, rows = {work: text for text, work in WORKS.items()}, []
    for order, answers in zip(orders, results, strict=True):
        seconds = {name: [answer["seconds"] for answer in of_one] for name, of_one in answers.items()}
        rows.append(
            {
                "text": texts[order["work"]],
                "batch": order["batch"],
                **{
                    f"{name} tok/s": order["batch"] * args.tokens / statistics.median(of_one)
                    for name, of_one in seconds.items()
                },
                "times faster": ratio(seconds["without"], seconds["with"]),
            }
        )
    publish(f"drafts looked up in the text, {model.name}", rows)


if __name__ == "__main__":
    main()
