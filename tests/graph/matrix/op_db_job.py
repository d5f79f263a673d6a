"""A worker of the op matrix: reads lines ``op dtype`` and answers each with a line of JSON.

``python -m tests.graph.matrix.op_db_job --lane capture --ops add addmm`` prints the answers for these ops instead.
"""

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from dlinfer.errors import CaptureError
from dlinfer.graph.report import report
from tests.graph.matrix import samples
from tests.graph.matrix.backends import LANES, Lane, compiler
from tests.graph.matrix.observer import first_line

REPORTED = 5
"""How many wrong samples of one op are described; all are counted."""


@dataclass
class Tally:
    """What became of an op's samples of one dtype.

    equal, close: right, to the bit or within tolerance. unsupported: reason -> count, the result right all the
    same. wrong: a wrong result or an exception where eager gives none. seconds: wall time.
    """

    equal: int = 0
    close: int = 0
    unsupported: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    details: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, sample: str, kind: str, detail: str) -> None:
        if kind == "unsupported":
            self.unsupported[detail] += 1
            return
        setattr(self, kind, getattr(self, kind) + 1)
        if kind == "wrong" and len(self.details) < REPORTED:
            self.details.append(f"{sample}: {detail}")

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "unsupported": dict(self.unsupported), "seconds": round(self.seconds, 2)}


def run_op(name: str, dtype: str, lane: Lane) -> Tally:
    """Run the samples of an op that the lane asks for, and their in-place variants."""
    tally = Tally()
    start = time.monotonic()
    torch._dynamo.reset()
    op = samples.OPS[name]
    for index, sample in enumerate(itertools.islice(samples.samples(name, dtype), lane.most)):
        for variant, function in variants(op, sample):
            given = (sample.input, tuple(sample.args), dict(sample.kwargs))
            outcome = check(function, given, lane, values=name not in samples.UNDEFINED_VALUES)
            if outcome is not None:
                tally.add(f"{variant} {index}", *outcome)
    tally.seconds = time.monotonic() - start
    return tally


def variants(op: Any, sample: Any) -> list[tuple[str, Callable[..., Any]]]:
    found = [("sample", op.op)]
    in_place = op.inplace_variant
    if in_place is not None and not sample.broadcasts_input and isinstance(sample.input, torch.Tensor):
        found.append(("in-place sample", in_place))
    return found


def check(function: Callable[..., Any], given: Any, lane: Lane, *, values: bool) -> tuple[str, str] | None:
    """Eager against the lane, results and inputs after the call; None where eager itself raises."""
    try:
        want = run(samples.fresh_call(function), given)
    except Exception:  # noqa: BLE001  in-place variants refuse samples that need a wider result, each op in its way
        return None
    counters.clear()
    with fallbacks() as outside:
        kind, detail = attempt(function, given, want, lane.backend, lane, values)
    if kind != "wrong":
        reason = unsupported() or next(iter(outside), "")
        return ("unsupported", reason) if reason else (kind, detail)
    theirs, their_detail = attempt(function, given, want, lane.judge, lane, values)
    return ("unsupported", f"{lane.judge} too: {their_detail}") if theirs == "wrong" else (kind, detail)


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Why nodes compiled inside ran outside the engine; filled when the block ends."""
    found: list[str] = []
    report.reset()
    yield found
    for graph in report.reports():
        found += [f"capture: {graph.refused}"] if graph.refused else []
        found += [f"engine: {node.reason}" for node in graph.placed("eager")]
        clusters = [cluster for region in graph.regions for cluster in region.clusters]
        found += [f"engine: {cluster.reason}" for cluster in clusters if cluster.origin == "eager"]


def attempt(
    function: Callable[..., Any], given: Any, want: Any, backend: str, lane: Lane, values: bool
) -> tuple[str, str]:
    """One compilation and call, compared: equal, close, unsupported or wrong, with what there is to say."""
    options = dict(lane.options or {}) if backend == lane.backend else None
    call = samples.fresh_call(function)
    compiled = torch.compile(call, backend=compiler(backend), dynamic=lane.dynamic, options=options)
    captured = {"capture_scalar_outputs": lane.unbacked, "capture_dynamic_output_shape_ops": lane.unbacked}
    try:
        with torch._dynamo.config.patch(captured):
            got = run(compiled, given)
    except Exception as cause:  # noqa: BLE001  whatever breaks is this sample's result
        return refusal(cause)
    return samples.difference(got, want, values=values)


def run(call: samples.Call, given: Any) -> tuple[Any, Any]:
    """The result and the inputs as the call left them."""
    mine = samples.copy(given)
    samples.seed()
    with torch.no_grad():
        return call(*mine), mine


def refusal(cause: Exception) -> tuple[str, str]:
    inner = cause.inner_exception if isinstance(cause, BackendCompilerFailed) else cause
    if isinstance(inner, CaptureError):
        return "unsupported", f"capture: {first_line(str(inner))}"
    return "wrong", f"raised {type(inner).__name__}: {first_line(str(inner))[:300]}"


def unsupported() -> str:
    """Why not the whole op was in one graph, empty if it was."""
    breaks = [first_line(reason) for reason in counters["graph_break"]]
    if breaks:
        return f"dynamo: {breaks[0]}"
    return "" if counters["stats"]["unique_graphs"] else "dynamo: no tensor op in it"


def answer(line: str, lane: Lane) -> dict[str, Any]:
    name, dtype = line.split()
    try:
        return run_op(name, dtype, lane).as_json()
    except Exception as cause:  # noqa: BLE001  the database's generators and comparisons may fail too
        return {"trouble": f"{type(cause).__name__}: {first_line(str(cause))}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lane", choices=tuple(LANES), default="capture")
    parser.add_argument("--ops", nargs="+", choices=tuple(samples.OPS), metavar="OP")
    parser.add_argument("--dtype", choices=tuple(samples.DTYPES), default="float32")
    options = parser.parse_args()
    lane = LANES[options.lane]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.ops:
        for name in options.ops:
            print(name, json.dumps(run_op(name, options.dtype, lane).as_json(), indent=2))
        return
    # What ops print must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(line, lane)), file=answers, flush=True)


if __name__ == "__main__":
    main()
