"""GGUF files through LMDeploy on the CPU and through llama.cpp: the same files, interleaved rounds.

    python -m benchmarks.gguf [FILE.gguf ...] [--works prefill-512 decode-1 decode-8] [--pairs 7]

Without a file: random weights of Qwen2.5-0.5B's shape, which llama.cpp quantises to Q8_0 and to Q4_K_M. llama.cpp is
compiled at the first run, into an environment of its own. Prints tokens a second with the median ratio and its 95 %
interval, and the peak memory. The last line is JSON.
"""

import argparse
import subprocess
from pathlib import Path

from benchmarks.arena import Entry, measure
from benchmarks.models import FOLDER, qwen2_half_billion
from benchmarks.peers.__main__ import OTHERS, WORKS
from benchmarks.peers.entries import OURS, gguf_of
from benchmarks.peers.environments import python_of
from benchmarks.serving import rows_of
from benchmarks.timing import publish, threads

PEER = "llama.cpp"
FORMATS = ("q8_0", "q4_k_m")


def random_files() -> list[Path]:
    """Return files of Qwen2.5-0.5B's shape, one for each of FORMATS, made if need be."""
    python = python_of(PEER)
    plain = gguf_of(qwen2_half_billion(FOLDER), python)
    for kind in FORMATS:
        subprocess.run(
            [python, "-m", "benchmarks.peers.llama_cpp", kind, str(plain), "--quantise"], check=True
        )
    return [plain.with_name(f"{plain.stem}-{kind}.gguf") for kind in FORMATS]


def contenders(file: Path) -> list[Entry]:
    python, options = python_of(PEER), {"threads": threads()}
    return [
        Entry(OURS, "lmdeploy-graph", file, {"dtype": "bfloat16"}),
        # For llama.cpp bf16 means the file as it is.
        Entry(PEER, "bf16", file, options, module="benchmarks.peers.llama_cpp", python=python),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.gguf")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=("prefill-512", "decode-1", "decode-8"))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--others", type=float, default=OTHERS, help="CPUs that others may keep busy in a round"
    )
    args = parser.parse_args()
    orders = [WORKS[name] for name in args.works]
    for file in args.files or random_files():
        _, results = measure(contenders(file), orders, args.pairs, args.others)
        kept = [(order, answers) for order, answers in zip(orders, results, strict=True) if answers[OURS]]
        if len(kept) < len(orders):
            print("some rounds were not quiet enough; see --others")
        rows = rows_of([OURS, PEER], [order for order, _ in kept], [answers for _, answers in kept], OURS)
        publish(f"{file.name}, LMDeploy on dlinfer against llama.cpp", rows)


if __name__ == "__main__":
    main()
