"""Checks of values: a call returns the right numbers, each time, in any thread."""

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlinfer import settings
from dlinfer.conformance.case import Case, Failed, Skipped, bits, dirty_memory, poison
from dlinfer.errors import KernelDeclined
from dlinfer.ops.core import oracle
from dlinfer.vendor import base, discovery

OUTPUTS = ("out", "attn_output")
"""The names of the arguments that a call writes and does not read."""

REPEATS = 3
THREADS = (1, 2, 5)
AT_ONCE = 8
"""The number of calls that each of two threads makes at the same time."""


def values(case: Case) -> None:
    """Check results against the reference in float64, within the op's tolerance."""
    want = case.expected()
    args = case.fresh()
    dirty_memory(want)
    case.compare(args, case.call(args), want)


def implementations(case: Case) -> str:
    """Check each kernel of an op that has several.

    Return a text for people: which kernels ran, and why others declined.
    """
    kernels = base.implementations(discovery.kernels_of(case.subject.vendor)[case.op.name])
    want, notes = case.expected(), list[str]()
    for kernel in kernels:
        name, args, rule = base.kernel_name(kernel), case.fresh(), base.rule_of(kernel)
        try:
            reason = None if rule is None else rule(*args)
            if reason is None:
                case.compare(args, kernel(*args), want)
        except KernelDeclined as declined:
            reason = str(declined)
        except Failed as wrong:
            raise Failed(f"{name}: {wrong}") from wrong
        notes.append(f"{name} {'ran' if reason is None else f'declined: {reason}'}")
    return "; ".join(notes)


def determinism(case: Case) -> None:
    """Check that the same call returns the same bits."""
    first: list[Tensor] = []
    for _ in range(REPEATS):
        args = case.fresh()
        dirty_memory(first)
        results = [bits(result) for result in oracle.results(case.op, args, case.call(args))]
        if first and not all(map(torch.equal, first, results)):
            raise Failed("repeating the same call changes the result's bits")
        first = results


def again(case: Case) -> None:
    """Check a second call with other numbers of the same sizes: a kernel must not reuse values of the first call."""
    args = case.fresh()
    case.call(args)
    other = replace(case, seed=case.seed + 1)
    args = other.fresh()
    other.compare(args, other.call(args), other.expected())


def outputs(case: Case) -> None:
    """Check that a call does not read the old contents of its outputs: with NaN in the outputs, results stay right."""
    if not set(OUTPUTS) & set(case.op.mutates):
        raise Skipped("the op has no output argument")
    if case.aliased:
        raise Skipped("in this sample, the output is an input")
    want = case.expected(_emptied(case, case.for_oracle()))
    args = _emptied(case, case.fresh())
    case.compare(args, case.call(args), want)


def _emptied(case: Case, args: list[Any]) -> list[Any]:
    for name, tensor in case.named(args):
        if name in OUTPUTS:
            tensor.fill_(poison(tensor.dtype))
    return args


def threads(case: Case) -> None:
    """Check calls with several numbers of torch threads, and calls from two threads at once."""
    want = case.expected()
    if case.subject.on_host:
        before = torch.get_num_threads()
        try:
            for count in THREADS:
                torch.set_num_threads(count)
                args = case.fresh()
                case.compare(args, case.call(args), want)
        finally:
            torch.set_num_threads(before)
    _at_once((case, replace(case, seed=case.seed + 1)))


def _at_once(cases: tuple[Case, ...]) -> None:
    """Call each case in its own thread. The cases have different numbers, so that a mix-up of results is noticed."""
    faults: list[BaseException] = []
    begin = threading.Barrier(len(cases))

    def call(case: Case) -> None:
        try:
            want, calls = case.expected(), [case.fresh() for _ in range(AT_ONCE)]
            begin.wait(60)
            with settings.override(fallback="error"), torch.no_grad():
                for args in calls:
                    case.compare(args, case.call(args), want)
        except BaseException as fault:  # noqa: BLE001 - told by the thread that waits
            faults.append(fault)
            begin.abort()

    callers = [threading.Thread(target=call, args=(case,)) for case in cases]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    real = [fault for fault in faults if not isinstance(fault, threading.BrokenBarrierError)]
    if real:
        raise real[0]
