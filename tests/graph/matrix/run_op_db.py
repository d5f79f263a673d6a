"""The op matrix: ``python -m tests.graph.matrix.run_op_db [--lane engine] [--shard 1/4] [--write-docs]``.

Every op of torch's own database, forward on the CPU, in the lanes of ``backends.LANES``: through Dynamo, capture and
passes and then run by FX, and through the engine. Worker processes answer op by op: one that crashes is a result and
not the end. Ops that have a result for exactly this code are not run again: an interrupted run goes on.

Exit code 0 only if nothing is wrong.
"""

import argparse
import queue
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.graph.matrix import op_table
from tests.graph.matrix.backends import LANES
from tests.graph.matrix.ledger import ENGINE_CODE, ROOT, STATE, Ledger, shard
from tests.graph.matrix.processes import Worker
from tests.graph.matrix.progress import progress

DOCUMENT = ROOT / "docs" / "results" / "graph_ops.md"


def run_missing(
    items: list[str], ledger: Ledger, lane: str, limit: float, workers: int, console: Console
) -> None:
    """Ask workers for every item that has no result yet, and note each answer when it comes."""
    done = ledger.entries()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for item in items:
        if item not in done:
            waiting.put(item)
    with progress(f"{lane} lane", len(items), len(items) - waiting.qsize(), console) as advance:
        stopping = threading.Event()

        def work(worker: Worker) -> None:
            while not stopping.is_set():
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    break
                result = worker.ask(item)
                if stopping.is_set():
                    break
                ledger.record(item, result)
                advance(op_table.complaints(item, result))
            worker.close()

        command = [sys.executable, "-m", "tests.graph.matrix.op_db_job", "--lane", lane]
        staff = [Worker(command, limit) for _ in range(workers)]
        threads = [threading.Thread(target=work, args=(worker,)) for worker in staff]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            stopping.set()
            for worker in staff:
                worker.close()
            raise


def parse_shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    return int(index), int(count)


def items_of(lane: str, only: list[str], part: tuple[int, int]) -> list[str]:
    """``op dtype`` for everything that a lane runs, of one shard and of ops whose name has one of the texts."""
    from tests.graph.matrix.samples import DTYPES, OPS  # seconds of import that --help need not wait for

    names = [name for name in OPS if not only or any(text in name for text in only)]
    return [
        f"{name} {dtype}"
        for name in shard(names, *part)
        for dtype in LANES[lane].dtypes
        if DTYPES[dtype] in OPS[name].supported_dtypes("cpu")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lane", nargs="+", choices=tuple(LANES), default=list(LANES))
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="ops whose name has a text")
    parser.add_argument(
        "--shard", type=parse_shard, default=(1, 1), metavar="I/N", help="the I-th of N parts"
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one op and dtype")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    parser.add_argument("--ledger", type=Path, default=STATE / "ops.jsonl")
    options = parser.parse_args()
    if options.write_docs and (options.only or options.shard[1] > 1 or options.lane != list(LANES)):
        parser.error("--write-docs needs every op in every lane: leave out --only, --shard and --lane")

    console = Console(stderr=True)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for lane in options.lane:
        items = items_of(lane, options.only, options.shard)
        ledger = Ledger(options.ledger, lane, ENGINE_CODE if LANES[lane].backend == "capture" else ())
        run_missing(items, ledger, lane, options.timeout, options.workers, console)
        entries = ledger.entries()
        results[lane] = {item: entries[item] for item in items}
        print(f"{LANES[lane].title}:\n{op_table.text(results[lane])}\n", flush=True)
    if options.write_docs:
        DOCUMENT.write_text(op_table.document(results))
    counts = sum((op_table.totals(of_lane) for of_lane in results.values()), Counter())
    return 1 if counts["wrong"] or counts["trouble"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
