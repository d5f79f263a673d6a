"""The findings of ``dlinfer doctor``, as data. The dataclasses are the schema of ``--json`` (docs/reference/json.md).

An error never ends doctor but becomes a finding, because users run doctor when a plugin, a setting or a framework is
broken. The process of doctor never imports LMDeploy.
"""

import contextlib
import json
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

import torch

import dlinfer
from dlinfer import settings
from dlinfer.cli import autoload
from dlinfer.errors import DlinferError
from dlinfer.framework.lmdeploy_ext import selfcheck
from dlinfer.graph.engine import find_engine
from dlinfer.graph.selftest.case import Result
from dlinfer.graph.selftest.suite import SelfTest
from dlinfer.ops import registry
from dlinfer.ops.core.kernels import kernel_authors, several_implementations
from dlinfer.vendor import discovery
from dlinfer.vendor.base import Vendor
from dlinfer.vendor.cpu.bf12 import speed
from dlinfer.vendor.cpu.device import CpuDevice
from dlinfer.vendor.cpu.host import cpus, memory

SCHEMA = 3

RIVALS = ("dlinfer-ascend", "dlinfer-maca", "dlinfer-camb")
"""Packages on PyPI of another project that is also named dlinfer. Each package is for one kind of device."""

Coverage = str
"""The code that runs an op: ``native``, ``reference``, ``none``, or the name of another vendor, whose kernel runs it.
"""


@dataclass(frozen=True)
class Versions:
    """Versions of installed packages; null for a missing package. LMDeploy's version is in ``Report.frameworks``."""

    dlinfer: str
    python: str
    torch: str
    transformers: str | None


@dataclass(frozen=True)
class Cpu:
    """The CPU as this process sees it.

    capability: torch's name of the vector instructions that torch uses. cores: physical cores that the process may
    use. quota: CPU time that the process's cgroups allow, in CPUs; null without a limit. usable: a text with the number
    of threads that can run at once, after the cores and limits that decide it. threads: torch's number of threads for
    one op. bf12_speedup: number of rows -> how many times faster a product is with weights in 12 bits (bf12) than in
    bfloat16. doctor measures it; it is empty without the C++ kernels. DLINFER_CPU_WEIGHTS=auto decides by it.
    """

    capability: str
    cores: int
    quota: float | None
    usable: str
    threads: int
    bf12_speedup: dict[str, float]


@dataclass(frozen=True)
class MemoryBound:
    """One limit on this process's memory. If there are several, the limit with the fewest available bytes applies."""

    available_bytes: int
    limit_bytes: int
    source: str


@dataclass(frozen=True)
class VendorState:
    """The state of a vendor.

    state: PASS if the vendor's probe succeeds and its kernels load, else FAIL. device_type: empty if unknown.
    """

    name: str
    state: Literal["PASS", "FAIL"]
    reason: str
    next_step: str
    device_type: str
    summary: str
    is_reference: bool


@dataclass(frozen=True)
class FailedCase:
    """A self-test case that failed on this CPU. covers: the ops that the engine or kernel therefore does not run."""

    name: str
    precision: str
    reason: str
    covers: list[str]


@dataclass(frozen=True)
class EngineSelfTest:
    """The self-test of an engine on this CPU.

    passed, not_run: numbers of cases. problem: why the self-test cannot run, or the cases that raised an error.
    """

    engine: str
    vendor: str
    passed: int
    not_run: int
    failed: list[FailedCase]
    problem: str


@dataclass(frozen=True)
class Report:
    """All findings of doctor.

    healthy: a vendor other than the reference passes, and ``problems`` is empty. It decides the exit status.
    memory: the tightest limit first.
    ops: op -> vendor -> coverage:
        native: the vendor's own kernel runs.
        the name of another vendor: a kernel of that other vendor runs, such as the CPU vendor's kernel for a vendor
            that has only graph engines.
        reference: the slow reference runs.
        none: calls fail. Either the vendor fails, or it has no kernel for the op and the fallback policy is "error".
    defaults: device type -> the vendor that runs ops there unless the user chooses another; null if there is none.
    implementations: vendor -> op -> the vendor's kernels for the op, the preferred one first. Only ops with several
        kernels are listed.
    selftests: one for each engine that has a self-test (docs/internals/selftest.md).
    unknown_variables: ``DLINFER_*`` environment variables that no setting has.
    problems: reasons why op calls fail: wrong settings, or a default vendor that fails.
    """

    schema: int
    healthy: bool
    versions: Versions
    cpu: Cpu
    memory: list[MemoryBound]
    frameworks: list[selfcheck.FrameworkState]
    vendors: list[VendorState]
    ops: dict[str, dict[str, Coverage]]
    defaults: dict[str, str | None]
    fallback_policy: str
    settings: list[settings.Origin]
    unknown_variables: list[str]
    problems: list[str]
    selftests: list[EngineSelfTest]
    implementations: dict[str, dict[str, list[str]]]


def to_json(report: Report) -> str:
    return json.dumps(asdict(report), indent=2)


def collect(selftest: bool = False) -> Report:
    """Examine this process, its machine and the installed packages. This takes seconds if a framework is installed.

    selftest: also run the self-test cases that have not run on this machine yet. The first time, this takes a minute.
    """
    origins = settings.origins(os.environ)
    with _hidden([origin.variable for origin in origins if origin.problem]):
        return _collect(origins, selftest)


@contextlib.contextmanager
def _hidden(variables: list[str]) -> Iterator[None]:
    """Remove variables with wrong values from the environment, so that everything else can be examined."""
    values = {variable: os.environ.pop(variable) for variable in variables}
    try:
        yield
    finally:
        os.environ.update(values)


def _collect(origins: list[settings.Origin], selftest: bool) -> Report:
    problems = [origin.problem for origin in origins if origin.problem]
    policy = "" if problems else settings.current().fallback
    problems += filter(None, (autoload.problem(), *rivals()))
    examined = [_examine(name) for name in discovery.names()]
    states = [state for state, _ in examined]
    defaults: dict[str, str | None] = {}
    if policy:
        defaults = _defaults(states, problems)
    return Report(
        schema=SCHEMA,
        healthy=not problems and any(s.state == "PASS" and not s.is_reference for s in states),
        versions=Versions(
            dlinfer.__version__, platform.python_version(), str(torch.__version__), _installed("transformers")
        ),
        cpu=_cpu(states),
        memory=[MemoryBound(*bound) for bound in sorted(memory.bounds())],
        frameworks=[selfcheck.check()],
        vendors=states,
        ops={
            op: {state.name: _coverage(op, state, authors, policy) for state, authors in examined}
            for op in registry()
        },
        defaults=defaults,
        fallback_policy=policy,
        settings=origins,
        unknown_variables=settings.unknown(os.environ),
        problems=problems,
        selftests=_selftests(states, selftest) if policy and not problems else [],
        implementations=_implementations(states),
    )


def _cpu(states: list[VendorState]) -> Cpu:
    usable = cpus.usable_cpus()
    capability = torch.backends.cpu.get_cpu_capability()
    is_available = any(state.name == "cpu" and state.state == "PASS" for state in states)
    speedups = speed.speedups(CpuDevice.max_batch_size) if is_available else {}
    return Cpu(
        capability,
        usable.cores,
        usable.quota,
        str(usable),
        torch.get_num_threads(),
        {str(rows): speedup for rows, speedup in speedups.items()},
    )


def _implementations(states: list[VendorState]) -> dict[str, dict[str, list[str]]]:
    several: dict[str, dict[str, list[str]]] = {}
    for state in states:
        if state.state == "PASS":
            try:
                kernels = several_implementations(discovery.get(state.name))
            except Exception:  # noqa: BLE001 - a plugin's code; the default devices report its failure
                continue
            if kernels:
                several[state.name] = kernels
    return several


def _selftests(states: list[VendorState], run: bool) -> list[EngineSelfTest]:
    selftests: list[EngineSelfTest] = []
    for state in states:
        if state.state != "PASS":
            continue
        for name in discovery.get(state.name).engines:
            try:
                selftest = find_engine(name, state.device_type).selftest
                results = selftest.results(run) if isinstance(selftest, SelfTest) else []
            except Exception as error:  # noqa: BLE001 - loading an engine runs a plugin's code; its failure is the finding
                selftests.append(
                    EngineSelfTest(name, state.name, 0, 0, [], f"{type(error).__name__}: {error}")
                )
                continue
            if selftest is not None:
                selftests.append(_counted(name, state.name, results))
    return selftests


def _counted(engine: str, vendor: str, results: list[Result]) -> EngineSelfTest:
    failed = [
        FailedCase(result.name, result.precision, result.reason, list(result.covers))
        for result in results
        if result.state == "failed"
    ]
    errors = [f"'{r.name}' in {r.precision}: {r.reason}" for r in results if r.state == "error"]
    problem = f"raised an error in {'; '.join(errors)}" if errors else ""
    states = [result.state for result in results]
    return EngineSelfTest(engine, vendor, states.count("passed"), states.count("not run"), failed, problem)


def rivals() -> list[str]:
    """Return a problem for each installed distribution in ``RIVALS``, because it overwrites files of this package."""
    return [
        (
            f"{name} {version} is installed too and writes into dlinfer's folder, so the files of the two packages are "
            f"mixed. Next step: pip uninstall {name} dlinfer, then install dlinfer again."
        )
        for name in RIVALS
        if (version := _installed(name)) is not None
    ]


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _examine(name: str) -> tuple[VendorState, Mapping[str, str]]:
    """Return a vendor's state and a mapping: op -> the name of the vendor whose kernel runs it.

    If the vendor fails, the mapping is empty.
    """
    try:
        vendor = discovery.get(name)
    except DlinferError as error:
        return VendorState(name, "FAIL", error.explanation, error.step, "", "", False), {}
    answer = discovery.probe(vendor)
    if not answer.available:
        return _state(vendor, "FAIL", answer.reason, answer.next_step), {}
    try:
        authors = kernel_authors(vendor)
    except DlinferError as error:
        return _state(vendor, "FAIL", error.explanation, error.step), {}
    except Exception as error:  # noqa: BLE001 - loading kernels runs a plugin's code; its failure is the finding
        reason = f"its kernels cannot be loaded: {type(error).__name__}: {error}"
        return _state(vendor, "FAIL", reason, "reinstall the package that provides it"), {}
    return _state(vendor, "PASS", answer.reason, answer.next_step), authors


def _state(vendor: Vendor, state: Literal["PASS", "FAIL"], reason: str, next_step: str) -> VendorState:
    return VendorState(
        vendor.name, state, reason, next_step, vendor.device_type, vendor.summary, vendor.is_reference
    )


def _coverage(op: str, vendor: VendorState, authors: Mapping[str, str], policy: str) -> Coverage:
    if vendor.state == "FAIL":
        return "none"
    if vendor.is_reference:
        return "reference"
    if op in authors:
        return "native" if authors[op] == vendor.name else authors[op]
    return "none" if policy == "error" else "reference"


def _defaults(states: list[VendorState], problems: list[str]) -> dict[str, str | None]:
    """Return device type -> default vendor.

    Append a text to ``problems`` for each default vendor that is missing or fails.
    """
    vendors: dict[str, str | None] = {}
    failing = {state.name for state in states if state.state == "FAIL"}
    for device_type in sorted({state.device_type for state in states} - {"", "any"}):
        try:
            with warnings.catch_warnings(action="ignore", category=discovery.VendorWarning):
                vendor = discovery.default(device_type)  # the table of vendors shows the vendors that fail
        except DlinferError as error:
            if str(error) not in problems:
                problems.append(str(error))
            continue
        vendors[device_type] = vendor.name if vendor is not None else None
        if vendor is not None and vendor.name in failing:
            problems.append(
                f"vendor {vendor.name!r} is the default for device {device_type}, but it fails. Next step: set "
                "DLINFER_VENDOR to a vendor that passes, or uninstall the failing vendor's package."
            )
    return vendors
