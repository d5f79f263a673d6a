"""The result of one check of one call, and all results together."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, DECLINED, SKIPPED, UNCLAIMED = "passed", "failed", "declined", "skipped", "unclaimed"
STATES = (PASSED, FAILED, DECLINED, SKIPPED, UNCLAIMED)
"""passed and failed: what was found. declined: the kernel says that it does not take such a call, and may.
skipped: the check does not apply. unclaimed: the vendor does not say that it serves this, so nothing was asked."""


@dataclass(frozen=True)
class Result:
    """The result of a check. op, dtype, sample: its subject; an empty sample stands for all of them.

    detail: what is wrong, or why nothing was found out; empty where it passed. seconds: how long it took.
    """

    op: str
    dtype: str
    sample: str
    check: str
    state: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def asked(self) -> tuple[str, str, str, str]:
        """The identity of the check; a run has each once."""
        return self.op, self.dtype, self.sample, self.check

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.dtype, self.sample) if part)
        return f"{self.op} [{where}] {self.check}: {self.detail or self.state}"


@dataclass(frozen=True)
class Header:
    """The subject of a run: vendor, package, device and versions.

    declared: the vendor says itself what it claims; else it is taken to claim each of its kernels, in part.
    """

    vendor: str
    distribution: str
    version: str
    device: str
    dlinfer: str
    torch: str
    thorough: bool
    declared: bool


@dataclass
class Report:
    """Everything that was found of a vendor."""

    header: Header
    results: list[Result] = field(default_factory=list[Result])
    seconds: float = 0.0

    @property
    def failures(self) -> list[Result]:
        """Results that break the vendor's claims."""
        return [result for result in self.results if result.state == FAILED]

    @property
    def holds(self) -> bool:
        """Whether every claim holds, and there is one that does."""
        return not self.failures and any(result.state == PASSED for result in self.results)

    def counts(self, results: Iterable[Result] | None = None) -> Counter[str]:
        """How many results there are of each state, of some or of all."""
        return Counter(result.state for result in (self.results if results is None else results))

    def by_op(self) -> dict[str, list[Result]]:
        """The results of each op."""
        grouped: dict[str, list[Result]] = {}
        for result in self.results:
            grouped.setdefault(result.op, []).append(result)
        return grouped

    def checks(self) -> list[str]:
        """Names of the checks that have results, in the order of their first result."""
        return list(dict.fromkeys(result.check for result in self.results))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; its form is documented in docs/reference/json.md."""
        counts = self.counts()
        return {
            "schema": 1,
            **asdict(self.header),
            "holds": self.holds,
            "seconds": round(self.seconds, 3),
            "counts": {state: counts[state] for state in STATES},
            "results": [asdict(result) for result in self.results],
        }
