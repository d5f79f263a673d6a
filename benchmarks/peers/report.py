"""docs/results/benchmarks_peers.md: one section per CPU type and model, from the JSON that each run left beside it."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import python_of
from benchmarks.peers.kinds import KINDS
from benchmarks.timing import Ratio

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "results" / "benchmarks_peers.md"
FOLDER = DOCS / "results" / "benchmarks"

_INTRODUCTION = """# Benchmarks against peers

For everybody who chooses a server for a CPU: LMDeploy on dlinfer against others, on the same weights.

Made by `python -m benchmarks.peers --write-docs`, one section per CPU type and model; do not edit. Weights are
random, the same for all. *times faster* is the median ratio of neighbouring runs with its 95 % interval: above 1 ours
is faster. Decoding is behind 512 tokens of each sequence.
"""

_HEAD = "| work | peer | ours tok/s | peer tok/s | times faster | peak GiB: ours, peer |"


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON has it."""
    return {name: list(value) if isinstance(value, Ratio) else value for name, value in row.items()}


def write(found: dict[str, Any]) -> None:
    """Keep one machine's figures of one model, draw them, and write the document of all."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{_stem(found)}.json"
    if path.is_file():  # precisions that were not run again stay
        before = json.loads(path.read_text())
        for name in ("rows", "settings"):
            found[name] = before.get(name, {}) | found[name]
    path.write_text(json.dumps(found, indent=1) + "\n")
    command = [python_of("plots"), str(Path(__file__).with_name("plot.py")), str(path)]
    subprocess.run(command, check=True)
    sections = [_section(one) for one in sorted(FOLDER.glob("*.json"), key=lambda one: one.stem)]
    DOCUMENT.write_text("\n".join([_INTRODUCTION, *sections]))


def _stem(found: dict[str, Any]) -> str:
    machine, model = found["machine"], _model(found)
    name = f"{machine['cpu']} {machine['capability']} {machine['threads']} threads"
    if model != "dense":
        name += f" {model}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _model(found: dict[str, Any]) -> str:
    return found.get("model", "dense")  # which the first figures do not say


def _section(path: Path) -> str:
    found = json.loads(path.read_text())
    machine = found["machine"]
    model = _model(found)
    product, operations = found["product peak"]
    title, of_model = KINDS[model].title, "" if model == "dense" else f": {model}"
    lines = [
        f"## {machine['cpu']}, {machine['capability']}, {machine['threads']} threads{of_model}",
        "",
        f"{title}. torch {machine['torch']}; read bandwidth {found['read bandwidth'] / 1e9:.1f} GB/s; "
        f"torch's {product} product {operations / 1e9:.0f} GFLOPS. A decoding step of batch 1 reads weights of "
        f"{found['weights'] / 1e9:.2f} GB where they are bfloat16: at most "
        f"{found['read bandwidth'] / found['weights']:.1f} steps a second.",
        "",
        f"![tokens per second](benchmarks/{path.stem}.svg)",
    ]
    for precision, rows in found["rows"].items():
        lines += ["", f"### {precision}", ""]
        if given := found.get("settings", {}).get(precision):
            lines += [f"Ours with {', '.join(f'`{name}={value}`' for name, value in given.items())}.", ""]
        lines += [_HEAD, "| --- | --- | --- | --- | --- | --- |"]
        for row in rows:
            median, low, high = row["times faster"]
            lines.append(
                f"| {row['work']} | {row['peer']} | {row['ours tok/s']:.1f} | {row['peer tok/s']:.1f} "
                f"| {median:.2f} [{low:.2f}, {high:.2f}] | {row['our peak GiB']}, {row['peer peak GiB']} |"
            )
    return "\n".join(lines) + "\n"
