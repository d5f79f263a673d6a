"""How a contender's process takes orders: JSON lines on stdin, answers on a pipe of their own.

Needs the standard library only, since a peer may run in an environment without torch. An order is
{"work": "decode" | "draw" | "prefill" | "requests", "batch": b, "length": n, "tokens": k}; the answer gives the seconds
of the decoding steps alone, greedy or drawn, or of the prefill, or what ``benchmarks.requests`` notes, and the peak RSS
meanwhile. Libraries print to stdout, so answers go to the pipe that the parent names in the environment's ANSWERS.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Contender(Protocol):
    """One way of running a model."""

    def run(self, work: str, batch: int, length: int, tokens: int) -> float | dict[str, Any]:
        """Carry out an order; gives its seconds, or them among more."""
        ...


def peak_rss() -> int:
    """Peak resident bytes since the last ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Let the kernel begin a new peak at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def take_orders(make: Callable[[], Contender]) -> None:
    """Make a contender, answer orders until stdin ends, and end the process."""
    with os.fdopen(int(os.environ["ANSWERS"]), "w") as answers:

        def answer(**fields: Any) -> None:
            answers.write(json.dumps(fields) + "\n")
            answers.flush()

        start = time.perf_counter()
        contender = make()
        answer(load=time.perf_counter() - start, rss=peak_rss())
        for line in sys.stdin:
            forget_peak()
            found = contender.run(**json.loads(line))
            answer(**(found if isinstance(found, dict) else {"seconds": found}), rss=peak_rss())
    os._exit(0)  # engines keep threads that wait for their own close
