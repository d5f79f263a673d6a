"""The self-test of one engine or library: runs the cases that cover an op when the op is first used, and remembers."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch

from dlinfer.graph.cache.disk import uncounted
from dlinfer.graph.cache.key import Key
from dlinfer.graph.selftest import store
from dlinfer.graph.selftest.case import Case, NotSupportedError, Result
from dlinfer.utils.closeness import difference

T = TypeVar("T")
_local = threading.local()


class WrongResult(str):
    """The reason for refusing an op whose self-test computed a wrong result."""

    __slots__ = ()


def is_running() -> bool:
    """Whether this thread runs a case now: meanwhile the ops under test are used."""
    return getattr(_local, "running", False)


class SelfTest:
    """The cases of an owner, and their results on this CPU. Safe to use from several threads; each case runs once.

    owner: returns its name and version, such as "OpenVINO 2026.4.1". cases: returns its cases. depends_on: returns
    what else results depend on besides the CPU and dlinfer.
    """

    def __init__(
        self,
        owner: Callable[[], str],
        cases: Callable[[], Iterable[Case]],
        depends_on: Callable[[], Any] = str,
    ) -> None:
        self._owner = owner
        self._depends_on = depends_on
        self._cases = cases
        self._table: Mapping[tuple[str, str], list[Case]] | None = None
        self._results: dict[tuple[str, str], Result] = {}
        self._failures: dict[tuple[str, str], str | None] = {}
        self._lock = threading.Lock()

    def failure(self, op: str, precision: str) -> str | None:
        """Why an op must not be used in a precision; None if its cases passed or it has none.

        The first call for an op runs its cases, or reads their results from disk. If a case raises an error, the op is
        not used in this process; the next process runs the case again.
        """
        if is_running():
            return None
        key = (op, precision)
        if key not in self._failures:
            with self._lock:
                cases = self._covering(key)
                bad = [result for result in map(self._result, cases) if result.state in ("failed", "error")]
                bad.sort(key=lambda result: result.state != "failed")
                reason = self._reason(bad[0]) if bad else None
                if any(case.skip_reason() for case in cases):  # it may run later
                    return reason
                self._failures[key] = reason
        return self._failures[key]

    def results(self, run: bool = True) -> list[Result]:
        """The result of each case. run: run the cases that have no result yet."""
        with self._lock:
            self._covering(("", ""))
            cases = {id(case): case for some in (self._table or {}).values() for case in some}
            return [self._result(case) if run else self._stored(case) for case in cases.values()]

    def _stored(self, case: Case) -> Result:
        key = (case.name, case.precision)
        result = self._results.get(key) or _isolated(lambda: store.load(self._key(key)))
        return result or _result_of(case, "not run", "nobody needed it yet")

    def _covering(self, key: tuple[str, str]) -> list[Case]:
        if self._table is None:
            table: dict[tuple[str, str], list[Case]] = {}
            for case in _isolated(lambda: list(self._cases())):
                for op in case.covers:
                    table.setdefault((op, case.precision), []).append(case)
            self._table = table
        return self._table.get(key, [])

    def _reason(self, result: Result) -> str:
        if result.state == "error":
            return (
                f"{self._owner()} failed in this process in the self-test '{result.name}' in {result.precision}: "
                f"{result.reason}"
            )
        return WrongResult(
            f"{self._owner()} on this CPU gets '{result.name}' wrong in {result.precision}: {result.reason}"
        )

    def _result(self, case: Case) -> Result:
        key = (case.name, case.precision)
        if key not in self._results:
            if (reason := case.skip_reason()) is not None:
                return _result_of(case, "not run", reason)
            self._results[key] = _isolated(lambda: self._loaded_or_run(case, self._key(key)))
        return self._results[key]

    def _loaded_or_run(self, case: Case, key: Key) -> Result:
        result = store.load(key)
        if result is None:
            result = _run(case)
            if result.state in ("passed", "failed"):  # the others may change
                store.save(key, result)
        return result

    def _key(self, key: tuple[str, str]) -> Key:
        return store.key_of(self._owner(), self._depends_on(), *key)


def _result_of(
    case: Case, state: Literal["passed", "failed", "error", "not run"], reason: str = ""
) -> Result:
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
    """Do work in a new thread, where no mode of the caller applies: tracing, autocast, gradients, default device."""
    done: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        _local.running = True
        with uncounted(), torch.no_grad():
            try:
                done.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

    thread = threading.Thread(target=run, name="dlinfer self-test")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return done[0]
