"""Requests of mixed lengths, all at once: LMDeploy on the vendor cpu against OpenVINO GenAI's continuous batching, and
llama.cpp batched as its server does, without sampling.

    python -m benchmarks.traffic [--requests 32] [--precisions f32 bf16 int8 int4] [--pairs 15] [--model FOLDER]
                                 [--peers genai llama.cpp]

On the shape of Qwen2.5-0.5B, prompts of 32 to 700 tokens and answers of 16 to 96, up to 32 of them in a batch. All run
in their own process and take turns; the same weights. Prints throughput with the median ratio and its 95 % interval,
and the times to the first token and between tokens, as medians over the rounds of each round's percentiles. The last
line is JSON.
"""

import argparse
import functools
import operator
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arena import Entry, measure
from benchmarks.models import FOLDER, qwen2_half_billion
from benchmarks.peers.entries import EVERY_PRECISION, OURS, entries
from benchmarks.timing import publish, ratio

MOST = 32
"""Requests in a batch."""
OTHERS = 0.2


def contenders(model: Path, precision: str, peers: Sequence[str] = ("genai",)) -> list[Entry]:
    """LMDeploy and its peers, each with room for MOST requests of some 800 tokens."""
    ours, *others = entries(model, precision, tuple(peers), {})
    room = dict(ours.options) | {"most": MOST, "blocks": MOST * 16}
    found = [Entry(OURS, ours.kind, ours.model, room, environment=ours.environment)]
    for one in others:
        if one.module != "benchmarks.genai":
            found.append(one)
        elif not any(other.module == one.module for other in found):  # both of its modes batch alike
            found.append(
                Entry("genai CB", "CB", one.model, one.options, module=one.module, python=one.python)
            )
    return found


def rows_of(names: list[str], answers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each contender."""

    def middle(name: str, *path: str) -> float:
        found: list[Any] = [functools.reduce(operator.getitem, path, one) for one in answers[name]]
        return statistics.median(found)

    seconds = {name: [one["seconds"] for one in answers[name]] for name in names}
    rows = []
    for name in names:
        row: dict[str, Any] = {"contender": name, "tok/s": middle(name, "tokens") / middle(name, "seconds")}
        row["times faster"] = ratio(seconds[name], seconds[OURS]) if name != OURS else None
        for kind, title in (("first", "first token s"), ("gap", "token s")):
            row |= {f"{title} {cut}": round(middle(name, kind, cut), 3) for cut in ("p50", "p90", "p99")}
        row["peak GiB"] = round(middle(name, "rss") / 2**30, 2)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--precisions", nargs="+", choices=EVERY_PRECISION, default=("bf16",))
    parser.add_argument("--peers", nargs="+", choices=("genai", "llama.cpp"), default=("genai",))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--others", type=float, default=OTHERS, help="CPUs that others may keep busy in a round"
    )
    parser.add_argument(
        "--model", type=Path, default=FOLDER, help="folder of the checkpoint, made if need be"
    )
    args = parser.parse_args()
    model = qwen2_half_billion(args.model)
    order = {"work": "requests", "batch": args.requests, "length": 0, "tokens": 0}
    for precision in args.precisions:
        taking_part = contenders(model, precision, args.peers)
        _, (answers,) = measure(taking_part, [order], args.pairs, args.others)
        if not answers[OURS]:
            print("no round was quiet enough; see --others")
            continue
        rows = rows_of([entry.name for entry in taking_part], answers)
        publish(f"{args.requests} requests, {precision}", rows)


if __name__ == "__main__":
    main()
