"""The plan of a run: which checks run, and each check's samples in a quick and in a thorough run."""

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch

from dlinfer.conformance import blocks, borders
from dlinfer.conformance.case import Case, Subject
from dlinfer.conformance.checks import graphs, indices, memory, shapes, values, whole
from dlinfer.errors import UnknownOpError
from dlinfer.ops.core.kernels import several_implementations
from dlinfer.ops.core.spec import OpSpec, registry
from dlinfer.vendor import discovery
from dlinfer.vendor.base import HOST
from dlinfer.vendor.claims import Claim, Claims

VALUES = "values"
DYNAMIC_CASES = 1, 5
"""The most further samples for a function compiled with symbolic sizes: (in a quick run, in a thorough run)."""


class Of(Enum):
    """The samples of an op that a check runs on.

    ONE: the first sample, in the first dtype. FIRST: the first sample, in each dtype. EVERY: all, in each dtype.
    """

    ONE = 1
    FIRST = 2
    EVERY = 3


@dataclass(frozen=True)
class Check:
    """A check.

    quick, thorough: which samples the check runs on in a quick and in a thorough run. eager: whether the check calls
    kernels; otherwise it runs compiled graphs.
    """

    name: str
    run: Callable[[Any], str | None]
    quick: Of
    thorough: Of
    eager: bool = True


CHECKS = (
    Check(VALUES, values.values, Of.EVERY, Of.EVERY),
    Check("implementations", values.implementations, Of.EVERY, Of.EVERY),
    Check("schema", shapes.schema, Of.EVERY, Of.EVERY),
    Check("fake", shapes.fake, Of.EVERY, Of.EVERY),
    Check("symbolic", shapes.symbolic, Of.ONE, Of.EVERY),
    Check("turned", shapes.turned, Of.EVERY, Of.EVERY),
    Check("aliasing", memory.aliasing, Of.EVERY, Of.EVERY),
    Check("mutation", memory.mutation, Of.EVERY, Of.EVERY),
    Check("views", memory.views, Of.EVERY, Of.EVERY),
    Check("outputs", values.outputs, Of.EVERY, Of.EVERY),
    Check("determinism", values.determinism, Of.EVERY, Of.EVERY),
    Check("again", values.again, Of.FIRST, Of.EVERY),
    Check("threads", values.threads, Of.ONE, Of.EVERY),
    Check("indices", indices.indices, Of.FIRST, Of.EVERY),
    Check("leaks", memory.leaks, Of.ONE, Of.FIRST),
    Check("graph", graphs.graph, Of.ONE, Of.EVERY, eager=False),
    Check("dynamic", graphs.graph, Of.ONE, Of.FIRST, eager=False),
)


WHOLE = (
    Check("eager", whole.eager, Of.EVERY, Of.EVERY),
    Check("graph", whole.graph, Of.ONE, Of.EVERY, eager=False),
    Check("dynamic", whole.dynamic, Of.ONE, Of.EVERY, eager=False),
)
"""The checks of whole blocks; each block has one sample."""


@dataclass(frozen=True)
class Task:
    """One check of one case. check: None if the vendor does not claim the op in this dtype; nothing runs then."""

    case: Case | whole.Whole
    check: Check | None
    claim: Claim | None = None
    run: Callable[[Any], str | None] | None = None


def claims_of(subject: Subject) -> Claims:
    """Return the vendor's claims: op -> claim.

    A vendor that declares no claims counts as claiming, in part, each op that it has a kernel for. "In part" means that
    a kernel may decline calls. Raises UnknownOpError for a claim of an unknown op.
    """
    vendor = subject.vendor
    if vendor.claims is None:
        return {op: Claim(in_part=True) for op in (vendor.load_kernels() if vendor.load_kernels else ())}
    claims = vendor.claims()
    for op in claims:
        if op not in registry():
            raise UnknownOpError(vendor=vendor.name, op=op, known=", ".join(registry()))
    return claims


def plan(
    subject: Subject, *, ops: Collection[str], checks: Collection[str], thorough: bool
) -> Iterator[Task]:
    """Yield all tasks of a run, op by op, except those of whole blocks.

    ops, checks: the names of the ops and the checks to run; empty for all.
    """
    claims, several = claims_of(subject), several_implementations(subject.vendor)
    for op in registry().values():
        if ops and op.name not in ops:
            continue
        for dtype in blocks.DTYPES:
            claim = claims.get(op.name)
            claimed = claim is not None and dtype in claim.dtypes
            if not claimed:
                yield Task(Case(subject, op, dtype, ""), None)
            for check in CHECKS:
                if checks and check.name not in checks:
                    continue
                if check.name == "implementations" and op.name not in several:
                    continue
                if (check.eager and not claimed) or (not check.eager and not subject.vendor.engines):
                    continue
                yield from _of_check(subject, op, dtype, check, claim if claimed else None, thorough)


def whole_blocks(
    subject: Subject, *, ops: Collection[str], checks: Collection[str], thorough: bool
) -> Iterator[Task]:
    """Yield the tasks of whole blocks: eager checks if the vendor has kernels, compiled checks if it has an engine."""
    for block in blocks.BLOCKS:
        if ops and block.name not in ops:
            continue
        for dtype in block.dtypes:
            for check in WHOLE:
                if checks and check.name not in checks:
                    continue
                if not (subject.vendor.load_kernels if check.eager else subject.vendor.engines):
                    continue
                if (check.thorough if thorough else check.quick) is Of.EVERY or dtype is blocks.DTYPES[0]:
                    yield Task(whole.Whole(subject, block, dtype), check)


def names() -> dict[str, list[str]]:
    """Return the names that can limit a run.

    "op" maps to the names of ops and blocks, "check" to the names of checks.
    """
    checks = dict.fromkeys(check.name for check in (*CHECKS, *WHOLE))
    return {"op": [*registry(), *(block.name for block in blocks.BLOCKS)], "check": list(checks)}


def _of_check(
    subject: Subject, op: OpSpec, dtype: torch.dtype, check: Check, claim: Claim | None, thorough: bool
) -> Iterator[Task]:
    extent = check.thorough if thorough else check.quick
    cases = list(cases_of(subject, op, dtype))
    if extent is Of.ONE and dtype is not _first_dtype(claim):
        return
    chosen = cases if extent is Of.EVERY else cases[:1]
    for case in chosen:
        if check.name == "dynamic":
            others = [other for other in cases[1 : 1 + DYNAMIC_CASES[thorough]] if not other.aliased]
            yield Task(case, check, claim, partial(graphs.dynamic, others=others))
        else:
            yield Task(case, check, claim)
    if check.name == VALUES:
        for name in borders.names(op.name):
            if thorough or (not name.startswith(borders.LARGE) and dtype is _first_dtype(claim)):
                yield Task(Case(subject, op, dtype, name, border=True), check, claim)


def _first_dtype(claim: Claim | None) -> torch.dtype:
    dtypes = blocks.DTYPES
    return dtypes[0] if claim is None else next(dtype for dtype in dtypes if dtype in claim.dtypes)


def cases_of(subject: Subject, op: OpSpec, dtype: torch.dtype) -> Iterator[Case]:
    """Yield an op's own samples as cases. The samples without aliased arguments come first."""
    samples = list(op.sample_inputs(subject.maker(dtype)))
    for sample in itertools.chain((s for s in samples if not s.aliased), (s for s in samples if s.aliased)):
        yield Case(subject, op, dtype, sample.name, sample.aliased)


def subject_of(name: str) -> Subject:
    """Activate the vendor ``name`` and return it as the vendor under test. Raises the errors of ``discovery.use``."""
    vendor = discovery.use(name)
    return Subject(vendor, HOST if vendor.device_type == "any" else vendor.device_type)
