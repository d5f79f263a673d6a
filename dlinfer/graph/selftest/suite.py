"""The known answers of one engine or library: asked when somebody wants to use what they decide, then remembered."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from dlinfer.graph.cache.disk import uncounted
from dlinfer.graph.cache.key import Key
from dlinfer.graph.selftest import store
from dlinfer.graph.selftest.answer import KnownAnswer, NotTakenError, Verdict, what_is_wrong

T = TypeVar("T")
_local = threading.local()


class WrongAnswer(str):
    """The reason of a refusal, where it is a wrong answer."""

    __slots__ = ()


def is_fault(reason: str) -> bool:
    """Whether a refusal's reason is that of a wrong answer."""
    return isinstance(reason, WrongAnswer)


def asking() -> bool:
    """Whether this thread works out a known answer: what is being tested is trusted meanwhile."""
    return getattr(_local, "asking", False)


class KnownAnswers:
    """What is known of an owner on this CPU. Threads may ask at once; each answer is computed once.

    owner: its name and version, such as "OpenVINO 2026.4.1". answers: what it is asked. depends_on: what else verdicts
    depend on besides the CPU and dlinfer.
    """

    def __init__(
        self,
        owner: Callable[[], str],
        answers: Callable[[], Iterable[KnownAnswer]],
        depends_on: Callable[[], Any] = str,
    ) -> None:
        self._owner = owner
        self._depends_on = depends_on
        self._answers = answers
        self._table: Mapping[tuple[str, str], list[KnownAnswer]] | None = None
        self._known: dict[tuple[str, str], Verdict] = {}
        self._faults: dict[tuple[str, str], str | None] = {}
        self._lock = threading.Lock()

    def fault(self, kind: str, precision: str) -> str | None:
        """Why a kind of op is not to be trusted in a precision; None where its answers are right, or it has none.

        The first call for a kind computes its answers, or reads from disk what came out before. Where that raises an
        error, the kind is not trusted in this process; the next process asks again.
        """
        if asking():
            return None
        key = (kind, precision)
        if key not in self._faults:
            with self._lock:
                asked = self._asked(key)
                verdicts = [v for v in map(self._verdict, asked) if v.state in ("wrong", "failed")]
                wrong_first = sorted(verdicts, key=lambda verdict: verdict.state != "wrong")
                reason = self._reason(wrong_first[0]) if wrong_first else None
                if any(one.unfit() for one in asked):  # it may be asked later
                    return reason
                self._faults[key] = reason
        return self._faults[key]

    def verdicts(self, ask: bool = True) -> list[Verdict]:
        """The verdict on each known answer. ask: whether those that were never asked are asked now."""
        with self._lock:
            self._asked(("", ""))
            answers = {id(one): one for some in (self._table or {}).values() for one in some}
            return [self._verdict(one) if ask else self._remembered(one) for one in answers.values()]

    def _remembered(self, one: KnownAnswer) -> Verdict:
        key = (one.name, one.precision)
        found = self._known.get(key) or _apart(lambda: store.load(self._key(key)))
        return found or Verdict(*key, tuple(sorted(one.decides)), "not asked", "nobody needed it yet")

    def _asked(self, key: tuple[str, str]) -> list[KnownAnswer]:
        if self._table is None:
            table: dict[tuple[str, str], list[KnownAnswer]] = {}
            for one in _apart(lambda: list(self._answers())):
                for kind in one.decides:
                    table.setdefault((kind, one.precision), []).append(one)
            self._table = table
        return self._table.get(key, [])

    def _reason(self, verdict: Verdict) -> str:
        asked = f"'{verdict.name}'"
        if verdict.state == "failed":
            said = f"{asked} in {verdict.precision}: {verdict.reason}"
            return f"{self._owner()} failed in this process when asked {said}"
        return WrongAnswer(
            f"{self._owner()} on this CPU gets {asked} wrong in {verdict.precision}: {verdict.reason}"
        )

    def _verdict(self, one: KnownAnswer) -> Verdict:
        key = (one.name, one.precision)
        if (unfit := one.unfit()) is not None and key not in self._known:
            return Verdict(*key, tuple(sorted(one.decides)), "not asked", unfit)
        if key not in self._known:
            self._known[key] = _apart(lambda: self._stored_or_judged(one, self._key(key)))
        return self._known[key]

    def _stored_or_judged(self, one: KnownAnswer, key: Key) -> Verdict:
        verdict = store.load(key)
        if verdict is None:
            verdict = _judged(one)
            if verdict.state in ("right", "wrong"):  # others may be so today and not tomorrow
                store.keep(key, verdict)
        return verdict

    def _key(self, key: tuple[str, str]) -> Key:
        return store.key_of(self._owner(), self._depends_on(), *key)


def _judged(one: KnownAnswer) -> Verdict:
    def verdict(state: Any, reason: str = "") -> Verdict:
        return Verdict(one.name, one.precision, tuple(sorted(one.decides)), state, reason)

    try:
        given = one.run()
    except NotTakenError as cause:
        return verdict("not asked", str(cause))
    except Exception as cause:  # noqa: BLE001 - whatever it raises, it is not to be trusted in this process
        origin = cause.__cause__ or cause
        lines = str(origin).strip().splitlines()
        return verdict("failed", f"{type(origin).__name__}: {lines[-1].strip() if lines else ''}"[:300])
    found = what_is_wrong(given, one.expected(), one.tolerance)
    return verdict("right") if found is None else verdict("wrong", found)


def _apart(work: Callable[[], T]) -> T:
    """Do work in a thread of its own, which none of the caller's modes reach: tracing, autocast, gradients, devices."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        with _asking(), uncounted(), torch.no_grad():
            try:
                done.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again below
                failed.append(error)

    thread = threading.Thread(target=run, name="dlinfer known answer")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


@contextmanager
def _asking() -> Iterator[None]:
    _local.asking = True
    try:
        yield
    finally:
        _local.asking = False
