"""Contenders as child processes that take turns: models stay loaded, and only one of them works at a time."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any


class Child:
    """One contender of ``benchmarks.contender``; ``load`` is how long it took to be ready, in seconds."""

    def __init__(self, kind: str, model: Path) -> None:
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contender", kind, str(model)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
            pass_fds=(write,),
            env=os.environ | {"ANSWERS": str(write), "TQDM_DISABLE": "1", "DLINFER_FALLBACK": "error"},
        )
        os.close(write)
        self._answers = os.fdopen(read)
        self.kind = kind
        try:
            self.load: float = self._answer()["load"]
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"contender {self.kind} ended with {self._process.wait()}; see above")
        return json.loads(line)

    def run(self, **order: Any) -> dict[str, Any]:
        """Carry out an order: its seconds and peak RSS."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

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
    kinds: list[str], model: Path, orders: list[dict[str, Any]], pairs: int
) -> tuple[dict[str, float], list[dict[str, list[dict[str, Any]]]]]:
    """(kind -> seconds to load; for each order: kind -> its answers, one a round). The turn goes round."""
    with ExitStack() as stack:
        children = {kind: stack.enter_context(Child(kind, model)) for kind in kinds}
        loads = {kind: child.load for kind, child in children.items()}
        results = []
        for order in orders:
            answers: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
            for turn in range(-2, pairs):  # two rounds to compile and to touch all memory
                shift = turn % len(kinds)
                for kind in kinds[shift:] + kinds[:shift]:
                    answer = children[kind].run(**order)
                    if turn >= 0:
                        answers[kind].append(answer)
                print(f"{order}: round {turn + 1} of {pairs}", file=sys.stderr, flush=True)
            results.append(answers)
    return loads, results
