"""LMDeploy on the vendor cpu against OpenVINO GenAI, llama.cpp and transformers: same weights, interleaved rounds.

    python -m benchmarks.peers [--model-kind dense] [--precisions f32 bf16 int8 int4]
        [--peers genai llama.cpp transformers] [--pairs 15] [--works prefill-512 prefill-2048 decode-1 decode-8]
        [--write-docs]

On the shape of Qwen2.5-0.5B; with ``--model-kind moe`` on a small mixture of experts of Qwen3-MoE's, in bf16, which
llama.cpp takes no part in. Peers are installed into environments of their own at the first run, where llama.cpp is
compiled. decode-N decodes N sequences behind 512 tokens each. A round beside other load is thrown away. Prints tables
and JSON; ``--write-docs`` also adds the machine's section to docs/results/benchmarks_peers.md, with plots.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.arena import measure
from benchmarks.peers import peaks, report
from benchmarks.peers.entries import EVERY_PRECISION, OURS, PEERS, entries
from benchmarks.peers.kinds import KINDS
from benchmarks.serving import rows_of
from benchmarks.timing import machine, publish

WORKS: dict[str, dict[str, Any]] = {
    "prefill-128": {"work": "prefill", "batch": 1, "length": 128, "tokens": 1},
    "prefill-512": {"work": "prefill", "batch": 1, "length": 512, "tokens": 1},
    "prefill-2048": {"work": "prefill", "batch": 1, "length": 2048, "tokens": 1},
    "decode-1": {"work": "decode", "batch": 1, "length": 512, "tokens": 24},
    "decode-4": {"work": "decode", "batch": 4, "length": 512, "tokens": 16},
    "decode-8": {"work": "decode", "batch": 8, "length": 512, "tokens": 12},
}
OTHERS = 0.2
"""CPUs that may be busy with other processes in a round that counts."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-kind", choices=KINDS, default="dense")
    parser.add_argument(
        "--precisions", nargs="+", choices=EVERY_PRECISION, help="by default all of the kind's"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="by default all of the kind's")
    parser.add_argument("--works", nargs="+", choices=WORKS, help="by default the kind's usual ones")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--others", type=float, default=OTHERS, help="CPUs that others may keep busy in a round"
    )
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, made if need be")
    parser.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    kind = KINDS[args.model_kind]
    peers = tuple(args.peers or kind.peers)
    precisions = args.precisions or kind.precisions
    taken = {*kind.precisions} | ({"f32"} if "bf16" in kind.precisions else set())
    if left_out := [*{*peers} - {*kind.peers}, *{*precisions} - taken]:
        parser.error(f"--model-kind {args.model_kind} is not measured with {', '.join(left_out)}")
    model = kind.make(args.model or kind.folder)
    orders = [WORKS[name] for name in args.works or kind.works]
    found: dict[str, Any] = {
        "machine": machine(),
        "model": args.model_kind,
        "read bandwidth": peaks.read_bandwidth(),
        "product peak": peaks.product_peak(),
        "weights": round((model / "model.safetensors").stat().st_size * kind.weights_read),
        "rows": {},
        "settings": {},  # ours
    }
    for precision in precisions:
        taking_part = entries(model, precision, peers, kind.transformers)
        _, results = measure(taking_part, orders, args.pairs, args.others)
        names = [entry.name for entry in taking_part]
        kept = [(order, answers) for order, answers in zip(orders, results, strict=True) if answers[OURS]]
        for order in orders:
            if all(order is not one for one, _ in kept):
                print(f"{order}: no round was quiet enough; see --others")
        rows = rows_of(names, [order for order, _ in kept], [answers for _, answers in kept], OURS)
        publish(f"LMDeploy on dlinfer against its peers, {precision}", rows)
        found["settings"][precision] = taking_part[0].environment
        found["rows"][precision] = [report.plain(row) for row in rows]
    print(json.dumps(found))
    if args.write_docs:
        report.write(found)


if __name__ == "__main__":
    main()
