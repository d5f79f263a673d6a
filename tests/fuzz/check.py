"""One program on one engine: what differs, what was refused, and whether torch alone differs likewise."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.graph.report import report
from tests.fuzz import compilers, doors, execute, limits
from tests.fuzz.budget import Budget
from tests.fuzz.compare import Difference, differences
from tests.fuzz.execute import CallTrace, Forward
from tests.fuzz.program import Program
from tests.graph.threads import together


@dataclass
class Verdict:
    """What is known of a program after it ran.

    differences: what is wrong, and no documented limit. limited: the limit that explains a difference.
    refused: why its door did not take it. torch: whether Dynamo without dlinfer differs likewise.
    taken: nodes that the engine took, of all; raised: whether eager raises.
    """

    differences: list[Difference] = field(default_factory=list)
    limited: str = ""
    refused: str = ""
    torch: bool = False
    taken: int = 0
    nodes: int = 0
    raised: bool = False


def check(program: Program, engine: str, interpreted: bool = False) -> Verdict:
    """Run a program eagerly and by an engine, and compare. ``interpreted``: inductor's loops run node by node."""
    torch._dynamo.reset()
    report.reset()
    verdict = Verdict()
    with execute.vendor_kept(), doors.loops_interpreted() if interpreted else contextlib.nullcontext():
        expected = eagerly(program)
        verdict.raised = expected[-1].error is not None
        budget = Budget(program)
        watch = program.door != "loaded"
        for run in _compiled(program, engine, watch):
            given = run
            if given[-1].error is not None and isinstance(given[-1].error, doors.Refused):
                verdict.refused = str(given[-1].error)
                given, expected = given[:-1], expected[: len(given) - 1]
            found = differences(expected, given, budget, watch)
            verdict.differences = [one for one in found if not compilers.common(program, one, given)]
            if verdict.differences:
                verdict.limited = _documented(program, engine, verdict.differences, given)
                break
        placed = [node for one in report.reports() for node in one.nodes if node.place in ("engine", "eager")]
        verdict.taken, verdict.nodes = sum(node.place == "engine" for node in placed), len(placed)
        if verdict.limited:
            verdict.differences = []
        elif not verdict.differences and program.seed % 8 == 0 and _can_repeat(program, verdict):
            verdict.differences = _compiles_again(program, engine)
        if verdict.differences and program.door == "compile":
            verdict.torch = _torch_alone(program, expected, budget)
    return verdict


def _can_repeat(program: Program, verdict: Verdict) -> bool:
    """Whether the last call may be made again: with another value of each number, unless that needs another graph."""
    valued = bool(program.calls[0].numbers) and "value of a number" in program.features()
    return program.door == "compile" and not program.threads and not verdict.raised and not valued


def eagerly(program: Program) -> list[CallTrace]:
    """The program without any compiler."""
    if program.door in ("artifact", "loaded"):  # they compute as at the time when they were made
        program = dataclasses.replace(
            program,
            calls=tuple(dataclasses.replace(call, state=program.calls[0].state) for call in program.calls),
        )
    model, kept = execute.module(program)
    forward = execute.plain(model)
    if program.door == "direct":
        forward = _of_contiguous(forward)
    elif program.door != "compile":
        forward = _laid_out_as_examples(forward)
    return execute.calls(program, forward, kept, watch=program.door != "loaded")


def _documented(
    program: Program, engine: str, found: Sequence[Difference], given: Sequence[CallTrace]
) -> str:
    """The lines of the docs by which an engine gives what it gave; empty where none say so."""
    if refused := limits.refused_slots(program, engine, found[0]):
        return refused
    kernels, unexplained = list[str](), {one.call for one in found}
    for lines, mode in limits.documented(engine):
        with mode:
            expected = eagerly(program)[: len(given)]
            differing = differences(expected, given, Budget(program), program.door != "loaded")
        wrong = {one.call for one in differing if not compilers.common(program, one, given)}
        if not wrong:
            return lines
        if unexplained - wrong:  # some calls run torch's kernels, others the engine's
            unexplained &= wrong
            kernels.append(lines)
    return "" if unexplained else "; ".join(kernels)


def _of_contiguous(forward: Forward) -> Forward:
    """A bound call computes with contiguous arguments, and lays its results out as for them."""
    return lambda arguments: forward(
        {name: one if isinstance(one, float) else one.contiguous() for name, one in arguments.items()}
    )


def _laid_out_as_examples(forward: Forward) -> Forward:
    """An artifact copies an argument that is not contiguous, if its example is. Examples clone the first arguments."""
    contiguous: set[str] | None = None

    def run(arguments: Mapping[str, Any]) -> Any:
        nonlocal contiguous
        if contiguous is None:
            tensors = {name: one for name, one in arguments.items() if isinstance(one, torch.Tensor)}
            contiguous = {name for name, one in tensors.items() if one.clone().is_contiguous()}
        return forward(
            {name: one.contiguous() if name in contiguous else one for name, one in arguments.items()}
        )

    return run


def _compiled(program: Program, engine: str, watch: bool) -> list[list[CallTrace]]:
    model, kept = execute.module(program)
    with doors.opened(program, model, engine) as forward:
        if program.threads:
            return together(2, lambda _: execute.calls(program, forward, kept, watch=watch))
        return [execute.calls(program, forward, kept, watch=watch)]


def _compiles_again(program: Program, engine: str) -> list[Difference]:
    """The last call made four times more: after the second nothing is compiled, where Dynamo alone compiles nothing."""
    last = program.calls[-1]
    more = [
        dataclasses.replace(last, numbers={name: 0.3 + number + i for name, number in last.numbers.items()})
        for i in range(4)
    ]
    repeated = dataclasses.replace(program, calls=(*program.calls, *more))
    torch._dynamo.reset()
    model, kept = execute.module(repeated)
    with doors.opened(repeated, model, engine) as forward:
        counts = _counts(repeated, forward, kept, doors.graphs)
    if len(counts) < len(repeated.calls) or counts[-1] == counts[-3]:
        return []
    torch._dynamo.reset()
    model, kept = execute.module(repeated)
    compiled: list[torch.fx.GraphModule] = []

    def as_it_is(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    alone = torch.compile(model, backend=as_it_is, dynamic=program.dynamic)
    others = _counts(repeated, execute.plain(alone), kept, lambda: len(compiled))
    if others[-1] != others[-3]:
        return []
    return [Difference("recompiles", len(counts) - 1, "the same call", f"{counts} graphs after each call")]


def _counts(program: Program, forward: Forward, kept: Any, count: Callable[[], int]) -> list[int]:
    """How many graphs there were after each call."""
    counts: list[int] = []

    def counting(arguments: Any) -> Any:
        made = forward(arguments)
        counts.append(count())
        return made

    execute.calls(program, counting, kept, watch=False)
    return counts


def _torch_alone(program: Program, expected: Sequence[CallTrace], budget: Budget) -> bool:
    """Whether torch.compile differs from eager without any code of dlinfer's."""
    torch._dynamo.reset()
    model, kept = execute.module(program)
    compiled = torch.compile(model, backend="eager", dynamic=program.dynamic)
    given = execute.calls(program, execute.plain(compiled), kept)
    return bool(differences(expected, given, budget))
