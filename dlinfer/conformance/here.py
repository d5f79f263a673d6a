"""Run checks in this process.

A kernel that crashes ends the process and so the run; use ``apart`` to survive a crash.
"""

import time
from collections.abc import Collection, Iterable
from importlib import metadata

import torch

from dlinfer import __version__, settings
from dlinfer.conformance import plan
from dlinfer.conformance.case import DECLINES, Failed, Skipped
from dlinfer.conformance.plan import Task
from dlinfer.conformance.result import (
    DECLINED,
    FAILED,
    PASSED,
    SKIPPED,
    UNCLAIMED,
    Header,
    Report,
    Result,
)
from dlinfer.vendor import discovery


def header(subject: plan.Subject, *, thorough: bool) -> Header:
    origin = discovery.origin(subject.vendor.name)
    distribution, version = (origin.distribution, origin.version) if origin else ("", "")
    return Header(
        vendor=subject.vendor.name,
        distribution=distribution,
        version=version,
        device=subject.device,
        dlinfer=__version__,
        torch=metadata.version("torch"),
        thorough=thorough,
        declared=subject.vendor.claims is not None,
    )


def tasks(
    subject: plan.Subject, *, ops: Collection[str] = (), checks: Collection[str] = (), thorough: bool = False
) -> list[Task]:
    """Return all tasks of a run, in an order that is the same in every process."""
    return [
        *plan.plan(subject, ops=ops, checks=checks, thorough=thorough),
        *plan.whole_blocks(subject, ops=ops, checks=checks, thorough=thorough),
    ]


def named(task: Task) -> Result:
    """Return a result that only names the task's op, dtype, sample and check.

    Its state is FAILED until the check has run.
    """
    case = task.case
    dtype = str(case.dtype).removeprefix("torch.")
    return Result(case.op.name, dtype, case.sample, task.check.name if task.check else "claim", FAILED)


def result(task: Task) -> Result:
    """Run a task and return its result. Never raises: an exception of the vendor's code is a failed result."""
    blank = named(task)
    if task.check is None:
        return _with(blank, UNCLAIMED, "the vendor does not claim this")
    start = time.perf_counter()
    state, detail = _asked(task)
    return _with(blank, state, detail, time.perf_counter() - start)


def _with(blank: Result, state: str, detail: str = "", seconds: float = 0.0) -> Result:
    return Result(blank.op, blank.dtype, blank.sample, blank.check, state, detail, round(seconds, 4))


def _asked(task: Task) -> tuple[str, str]:
    assert task.check is not None
    run = task.run or task.check.run
    try:
        with torch.no_grad(), settings.override(fallback="error"):
            note = run(task.case)
    except Failed as fault:
        return FAILED, str(fault)
    except Skipped as reason:
        return SKIPPED, str(reason)
    except DECLINES as declined:
        reason = str(declined.fields.get("reason", declined.explanation))
        in_full = task.check.name == plan.VALUES and task.claim is not None and not task.claim.in_part
        return (
            (FAILED, f"the vendor claims every call, but declined this one: {reason}")
            if in_full
            else (DECLINED, reason)
        )
    except Exception as error:  # noqa: BLE001 - a vendor's code; any exception is a finding
        first = (str(error) or "no message").strip().splitlines()[0]
        return FAILED, f"the call raised {type(error).__name__}: {first}"
    return PASSED, note or ""


def served_none(found_by: Header, results: Iterable[Result]) -> list[Result]:
    """Return a failure for each (op, dtype) with only declined samples, because a claim needs at least one served call.

    Vendors that declare no claims get no such failure. found_by, results: the header and the results of the whole run.
    """
    if not found_by.declared:
        return []
    states: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.check == plan.VALUES:
            states.setdefault((result.op, result.dtype), []).append(result.state)
    return [
        Result(op, dtype, "", "claim", FAILED, "the vendor claims this, but declined every sample")
        for (op, dtype), states_of_op in states.items()
        if set(states_of_op) == {DECLINED}
    ]


def run(
    name: str, *, ops: Collection[str] = (), checks: Collection[str] = (), thorough: bool = False
) -> Report:
    """Run all checks of a vendor. Raises UnknownOpError and the errors of activating the vendor."""
    start = time.perf_counter()
    subject = plan.subject_of(name)
    results = [result(task) for task in tasks(subject, ops=ops, checks=checks, thorough=thorough)]
    about = header(subject, thorough=thorough)
    return Report(about, results + served_none(about, results), time.perf_counter() - start)
