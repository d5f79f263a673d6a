"""The model matrix: ``python -m tests.graph.matrix.run_models [--only NAME ...] [--write-docs]``.

One process an architecture, so that a crash is a result and not the end. Architectures that have a result for
exactly this code are not run again: an interrupted run goes on. Exit code 0 only if every one asked for passes.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.graph.matrix.ledger import ROOT, STATE, Ledger
from tests.graph.matrix.models import ARCHITECTURES, LEFT_OUT
from tests.graph.matrix.processes import run, stop_running
from tests.graph.matrix.progress import progress
from tests.graph.matrix.verdict import HEADER, failures, markdown, row

DOCUMENT = ROOT / "docs" / "results" / "graph_models.md"
CHOICES = {architecture.name: architecture for architecture in ARCHITECTURES}
KINDS = sorted({architecture.kind for architecture in ARCHITECTURES})


def job(name: str, backend: str, limit: float) -> dict[str, Any]:
    """The record of one architecture, or ``{"trouble": why}`` when its process did not give one."""
    command = [sys.executable, "-m", "tests.graph.matrix.model_job", name, "--backend", backend]
    finished = run(command, limit)
    if trouble := finished.trouble(limit):
        return {"trouble": trouble}
    return json.loads(finished.out.splitlines()[-1])


def run_missing(
    names: list[str], ledger: Ledger, backend: str, limit: float, workers: int, console: Console
) -> None:
    done = ledger.entries()
    missing = [name for name in names if name not in done]
    already = len(names) - len(missing)
    with progress("models", len(names), already, console) as advance, ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(job, name, backend, limit): name for name in missing}
        try:
            for future in as_completed(running):
                name, record = running[future], future.result()
                ledger.record(name, record)
                problems = "; ".join(failures(record)) or "pass"
                advance([f"{name}: {problems}"])
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_running()
            raise


def document(rows: list[tuple[str, ...]], backend: str) -> str:
    passed = sum(line[2] == "pass" for line in rows)
    left_out = "\n".join(f"- {name}: {reason}." for name, reason in LEFT_OUT.items())
    versions = ", ".join(f"{library} {metadata.version(library)}" for library in ("torch", "transformers"))
    return f"""# Models through torch.compile

For everybody who compiles transformers models: which architectures work, and in how many graphs.

Made by `make graph-models`; do not edit. {passed} of {len(rows)} architectures pass, with {versions}.

Each is transformers' own class with a tiny random configuration in float32. It is called eagerly and through
`torch.compile(model, backend="{backend}")` with default settings under `torch.no_grad()`: three batch sizes, four
lengths, everything twice. Generators run prefill and greedy decode steps over a `StaticCache`. A pass means:

- every result within the tolerance of eager's and every greedy token equal;
- at most 3 compilations (*compiled*; the notes have the reason for more), and none when the same sizes come again.
  *size-1* counts others: Dynamo compiles a call apart if a size that varies is 1, as the length of each decode step is;
- no graph break that `aot_eager` does not have on the same calls, and nothing that fell back to eager.

*max error* is relative to the largest number of the tensor compared; the tolerance and its reason stand in
`tests/graph/matrix/model_job.py`, the configurations in `models.py` beside it. *Nodes in clusters / kernels* counts
the computing nodes of all compiled graphs: those in loops that inductor compiles, and those that call a kernel.

{markdown(rows)}

Tried and left out:

{left_out}
"""


def show(rows: list[tuple[str, ...]], console: Console) -> None:
    if not console.is_terminal:
        console.width = 200
    table = Table(*HEADER, box=None)
    for line in rows:
        table.add_row(*line, style="" if line[2] == "pass" else "red")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="architectures whose name has a text"
    )
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument(
        "--backend", default="dlinfer", help="of torch.compile, or `capture`: dlinfer's capture alone"
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one architecture")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    parser.add_argument("--ledger", type=Path, default=STATE / "models.jsonl")
    options = parser.parse_args()

    names = [
        name
        for name, architecture in CHOICES.items()
        if options.kind in (None, architecture.kind)
        and (not options.only or any(text in name for text in options.only))
    ]
    if not names:
        parser.error(f"no architecture has {options.only} in its name; there are {', '.join(CHOICES)}")
    if options.write_docs and len(names) < len(CHOICES):
        parser.error("--write-docs needs every architecture: leave out --only and --kind")
    console = Console(stderr=True)
    ledger = Ledger(options.ledger, options.backend)
    run_missing(names, ledger, options.backend, options.timeout, options.workers, console)
    records = ledger.entries()
    rows = [row(CHOICES[name], records[name]) for name in names]
    show(rows, Console())
    if options.write_docs:
        DOCUMENT.write_text(document(rows, options.backend))
    passed = sum(line[2] == "pass" for line in rows)
    console.print(f"{passed} of {len(rows)} architectures pass")
    return 0 if passed == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
