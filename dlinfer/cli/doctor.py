"""The findings of ``dlinfer doctor``, as data. The dataclasses are the schema of ``--json`` (docs/reference/json.md).

No finding may end the doctor: users run it because a plugin, a setting or a framework is broken. LMDeploy is never
imported in this process.
"""

import json
import os
import platform
import warnings
from collections.abc import Mapping
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
from dlinfer.vendor.cpu.host import cpus, memory

SCHEMA = 3

RIVALS = ("dlinfer-ascend", "dlinfer-maca", "dlinfer-camb")
"""Distributions of another project with the same name on PyPI, one for each vendor."""

Coverage = str
"""``native``, ``reference``, ``none``, or the name of another vendor, whose kernel answers."""


@dataclass(frozen=True)
class Versions:
    """Of what is installed; null where it is not. LMDeploy's stands under ``frameworks``."""

    dlinfer: str
    python: str
    torch: str
    transformers: str | None


@dataclass(frozen=True)
class Cpu:
    """capability: torch's name of the vector instructions it uses. cores: physical ones that this process may use.
    quota: CPUs' worth of time that its cgroups allow, null without a limit. usable: how many threads can run at once,
    and why. threads: torch's number, for one op."""

    capability: str
    cores: int
    quota: float | None
    usable: str
    threads: int


@dataclass(frozen=True)
class MemoryBound:
    """One limit on this process's memory; the one with the least available counts."""

    available_bytes: int
    limit_bytes: int
    source: str


@dataclass(frozen=True)
class VendorState:
    """state: PASS when its probe says yes and its kernels load and fit. device_type: empty if unknown."""

    name: str
    state: Literal["PASS", "FAIL"]
    reason: str
    next_step: str
    device_type: str
    summary: str
    is_reference: bool


@dataclass(frozen=True)
class FailedCase:
    """A self-test case that an engine or kernel fails on this CPU. covers: the ops that run another way for it."""

    name: str
    precision: str
    reason: str
    covers: list[str]


@dataclass(frozen=True)
class EngineSelfTest:
    """The self-test of an engine on this CPU.

    passed, not_run: numbers of cases. problem: why it cannot run, or which cases raised an error in this process.
    """

    engine: str
    vendor: str
    passed: int
    not_run: int
    failed: list[FailedCase]
    problem: str


@dataclass(frozen=True)
class Report:
    """All that doctor says.

    healthy: a vendor other than the reference passes and ``problems`` is empty; the exit status follows it.
    memory: tightest bound first.
    ops: op -> vendor -> coverage. native: a kernel of the vendor's own. Another vendor's name: that one's
        kernel, as the host's for vendors that bring graph engines only. reference: the slow reference answers.
        none: a call is refused, since the vendor fails or the fallback policy is "error".
    defaults: device type -> the vendor that answers there unless another is chosen, or null.
    implementations: vendor -> op -> its kernels, the preferred one first, where a vendor has several for an op.
    selftests: of each engine that has one (docs/internals/selftest.md).
    unknown_variables: ``DLINFER_*`` variables in the environment that are no setting.
    problems: what makes op calls fail: wrong settings, or a default vendor that fails.
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
    """Return the report as one JSON object."""
    return json.dumps(asdict(report), indent=2)


def collect(selftest: bool = False) -> Report:
    """Look at this process, its machine and what is installed. Takes seconds where a framework is.

    selftest: run the self-test cases that never ran on this machine, which takes a minute the first time.
    """
    origins = settings.origins(os.environ)
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
        cpu=_cpu(),
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


def _cpu() -> Cpu:
    usable = cpus.usable_cpus()
    capability = torch.backends.cpu.get_cpu_capability()
    return Cpu(capability, usable.cores, usable.quota, str(usable), torch.get_num_threads())


def _implementations(states: list[VendorState]) -> dict[str, dict[str, list[str]]]:
    """Vendor -> op -> kernels, for ops with several kernels."""
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
    """Distributions beside dlinfer that install a folder ``dlinfer`` too: files of one lie where the other's should."""
    return [
        f"{name} {version} is installed beside dlinfer, and installs the same folder: files of the two are mixed. "
        f"Next step: pip uninstall {name} dlinfer, then install dlinfer again."
        for name in RIVALS
        if (version := _installed(name)) is not None
    ]


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _examine(name: str) -> tuple[VendorState, Mapping[str, str]]:
    """A vendor's state, and if it passes, who wrote the kernel that answers each op."""
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
    return _state(vendor, "PASS", answer.reason, ""), authors


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
    """Device type -> default vendor. Adds to ``problems`` where that cannot be had or fails."""
    vendors: dict[str, str | None] = {}
    failing = {state.name for state in states if state.state == "FAIL"}
    for device_type in sorted({state.device_type for state in states} - {"", "any"}):
        try:
            with warnings.catch_warnings(action="ignore", category=discovery.VendorWarning):
                vendor = discovery.default(device_type)  # what it passes over stands in the table of vendors
        except DlinferError as error:
            problems.append(str(error))
            return vendors
        vendors[device_type] = vendor.name if vendor is not None else None
        if vendor is not None and vendor.name in failing:
            problems.append(
                f"vendor {vendor.name!r} is the default for device {device_type} and fails. "
                "Next step: set DLINFER_VENDOR to one that passes, or uninstall it."
            )
    return vendors
