"""Contenders as child processes that take turns: models stay loaded, and only one of them works at a time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load import Watch


@dataclass(frozen=True)
class Entry:
    """Who takes part, under ``name``.

    kind, options: of ``module``'s command line. python: the interpreter, where it is of another environment.
    environment: variables for its process.
    """

    name: str
    kind: str
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    module: str = "benchmarks.contender"
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """One contender of ``benchmarks.contender``; ``load`` is how long it took to be ready, in seconds."""

    def __init__(self, entry: Entry) -> None:
        read, write = os.pipe()
        variables = {"ANSWERS": str(write), "TQDM_DISABLE": "1", "DLINFER_FALLBACK": "error"}
        self._process = subprocess.Popen(
            [entry.python, "-m", entry.module, entry.kind, str(entry.model), json.dumps(dict(entry.options))],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
            pass_fds=(write,),
            env=os.environ | variables | dict(entry.environment),
        )
        os.close(write)
        self._answers = os.fdopen(read)
        self.name = entry.name
        try:
            self.load: float = self._answer()["load"]
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"contender {self.name} ended with {self._process.wait()}; see above")
        return json.loads(line)

    def run(self, **order: Any) -> dict[str, Any]:
        """Carry out an order: its seconds, its peak RSS, and how many CPUs were busy with others meanwhile."""
        assert self._process.stdin is not None
        watch = Watch(self._process.pid, time.perf_counter())
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer | {"others": watch.others(time.perf_counter())}

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended before
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._answers.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def measure(
    entries: Sequence[Entry], orders: Sequence[dict[str, Any]], pairs: int, others: float = float("inf")
) -> tuple[dict[str, float], list[dict[str, list[dict[str, Any]]]]]:
    """(name -> seconds to load; for each order: name -> its answers, one a round). The turn goes round.

    others: a round in which more CPUs than that were busy with other processes is thrown away; there are at most twice
    as many rounds as pairs, so that there may be fewer answers than pairs on a machine that is never quiet.
    """
    with ExitStack() as stack:
        children = {entry.name: stack.enter_context(Child(entry)) for entry in entries}
        loads = {name: child.load for name, child in children.items()}
        names = list(children)
        results = []
        for order in orders:
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for turn in range(-2, 2 * pairs):  # two rounds to compile and to touch all memory
                shift = turn % len(names)
                round_ = {name: children[name].run(**order) for name in names[shift:] + names[:shift]}
                quiet = all(answer["others"] <= others for answer in round_.values())
                if turn >= 0 and quiet:
                    for name, answer in round_.items():
                        answers[name].append(answer)
                kept = len(answers[names[0]])
                print(f"{order}: {kept} of {pairs} rounds", file=sys.stderr, flush=True)
                if kept == pairs:
                    break
            results.append(answers)
    return loads, results
