"""The self-test of an engine or library. The first use of an op runs the cases that cover it; results are stored."""

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from dlinfer.graph.cache.disk import ArtifactCache, uncounted
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.cache.key import Key
from dlinfer.graph.selftest.case import Case, NotSupportedError, Result, State
from dlinfer.settings import cache_folder
from dlinfer.utils.closeness import difference

T = TypeVar("T")
_local = threading.local()


class WrongResult(str):
    """The reason for refusing an op: its self-test computed a wrong result."""

    __slots__ = ()


def is_running() -> bool:
    """Return whether this thread runs a case now. A running case may use the ops under test."""
    return getattr(_local, "running", False)


@dataclass(eq=False)
class SelfTest:
    """The cases of an engine or library, and their results on this CPU. Thread-safe; each case runs once.

    owner: returns the name and version of the engine or library, such as "OpenVINO 2026.4.1".
    cases: returns the cases.
    depends_on: returns further facts that results depend on, besides the owner, the CPU and dlinfer.
    """

    owner: Callable[[], str]
    cases: Callable[[], Iterable[Case]]
    depends_on: Callable[[], object] = str

    def __post_init__(self) -> None:
        self._cases: list[Case] | None = None
        self._results: dict[tuple[str, str], Result] = {}
        self._failures: dict[tuple[str, str], str | None] = {}
        self._lock = threading.Lock()

    def failure(self, op: str, precision: str) -> str | None:
        """Return a reason not to use ``op`` in ``precision``; None if no case for this op and precision failed.

        The first call for an op runs its cases, or reads their results from disk. If a case raises an error, this
        process does not use the op; the next process runs the case again.
        """
        if is_running():
            return None
        key = (op, precision)
        if key not in self._failures:
            with self._lock:
                cases = [case for case in self._all() if op in case.covers and case.precision == precision]
                bad = [result for result in map(self._result, cases) if result.state in ("failed", "error")]
                bad.sort(key=lambda result: result.state != "failed")
                reason = self._reason(bad[0]) if bad else None
                if any(case.skip_reason() for case in cases):  # a skipped case may run later
                    return reason
                self._failures[key] = reason
        return self._failures[key]

    def results(self, run: bool = True) -> list[Result]:
        """Return the result of each case. run: whether to run the cases that have no result yet."""
        with self._lock:
            return [self._result(case, run) for case in self._all()]

    def save(self, result: Result) -> None:
        """Store a result on disk. If the folder cannot be written, the next process runs the case again."""
        _cache().store(self._key(result), lambda: json.dumps(asdict(result)).encode())

    def _all(self) -> list[Case]:
        if self._cases is None:
            self._cases = _isolated(lambda: list(self.cases()))
        return self._cases

    def _reason(self, result: Result) -> str:
        case = f"'{result.name}'"
        if result.state == "error":
            failure = f"raised an error in the self-test {case}"
            return f"{self.owner()} {failure} in {result.precision}: {result.reason}"
        return WrongResult(
            f"{self.owner()} on this CPU gets {case} wrong in {result.precision}: {result.reason}"
        )

    def _result(self, case: Case, run: bool = True) -> Result:
        key = (case.name, case.precision)
        if key not in self._results:
            if run and (reason := case.skip_reason()) is not None:
                return _result_of(case, "not run", reason)
            result = _isolated(lambda: self._loaded_or_run(case, run))
            if result is None:
                return _result_of(case, "not run", "no op needed it yet")
            self._results[key] = result
        return self._results[key]

    def _loaded_or_run(self, case: Case, run: bool) -> Result | None:
        result = _cache().load(self._key(case), _read)
        if result is None and run:
            result = _run(case)
            if result.state in ("passed", "failed"):  # other states may change
                self.save(result)
        return result

    def _key(self, case: Case | Result) -> Key:
        return Key(
            kind="self-test",
            subject=f"{case.name} in {case.precision}",
            environment=environment(),
            engine=self.owner(),
            engine_identity=self.depends_on(),
        )


def _cache() -> ArtifactCache:
    return ArtifactCache(cache_folder(), "selftest")


def _read(contents: bytes) -> Result:
    fields = json.loads(contents)
    return Result(**fields | {"covers": tuple(fields["covers"])})


def _result_of(case: Case, state: State, reason: str = "") -> Result:
    return Result(case.name, case.precision, tuple(sorted(case.covers)), state, reason)


def _run(case: Case) -> Result:
    try:
        actual = case.run()
    except NotSupportedError as cause:
        return _result_of(case, "not run", str(cause))
    except Exception as cause:  # noqa: BLE001 - after any error the op is not used in this process
        origin = cause.__cause__ or cause
        lines = str(origin).strip().splitlines()
        text = f"{type(origin).__name__}: {lines[-1].strip() if lines else ''}"
        return _result_of(case, "error", text[:300])
    wrong = difference(actual, case.expected(), rtol=case.tolerance, atol=case.tolerance)
    return _result_of(case, "passed") if wrong is None else _result_of(case, "failed", wrong)


def _isolated(work: Callable[[], T]) -> T:
    """Run ``work`` in a new thread, without the caller's modes: tracing, autocast, gradients, default device."""

    def run() -> T:
        _local.running = True
        with uncounted(), torch.no_grad():
            return work()

    with ThreadPoolExecutor(1, "dlinfer self-test") as thread:
        return thread.submit(run).result()
