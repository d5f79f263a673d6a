"""The result of one check of one call, and all results together."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, DECLINED, SKIPPED, UNCLAIMED = "passed", "failed", "declined", "skipped", "unclaimed"
STATES = (PASSED, FAILED, DECLINED, SKIPPED, UNCLAIMED)
"""The states of a result.

passed, failed: the finding of the check.
declined: the kernel declined the call, and the vendor's claim allows that.
skipped: the check does not apply.
unclaimed: the vendor does not claim the op in this dtype, so nothing was checked.
"""


@dataclass(frozen=True)
class Result:
    """The result of a check. op, dtype, sample: the checked call; an empty sample stands for all samples.

    detail: the fault of a failed check, or the reason that a check was skipped or a call declined. For a passed check
        it is a note or empty.
    seconds: how long the check took.
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
        """The identity of the check, unique in a run: op, dtype, sample and check."""
        return self.op, self.dtype, self.sample, self.check

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.dtype, self.sample) if part)
        return f"{self.op} [{where}] {self.check}: {self.detail or self.state}"


@dataclass(frozen=True)
class Header:
    """A run's vendor, package, device and versions.

    declared: whether the vendor declares its claims. If not, the vendor counts as claiming each op that it has a kernel
    for, but may decline some calls of the op.
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
    """All results of a vendor."""

    header: Header
    results: list[Result] = field(default_factory=list[Result])
    seconds: float = 0.0

    @property
    def failures(self) -> list[Result]:
        """The results in the state FAILED. They break the vendor's claims."""
        return [result for result in self.results if result.state == FAILED]

    @property
    def holds(self) -> bool:
        """Whether no check failed and at least one passed."""
        return not self.failures and any(result.state == PASSED for result in self.results)

    def counts(self, results: Iterable[Result] | None = None) -> Counter[str]:
        """Return state -> number of results, for ``results`` or, if None, for all results."""
        return Counter(result.state for result in (self.results if results is None else results))

    def by_op(self) -> dict[str, list[Result]]:
        grouped: dict[str, list[Result]] = {}
        for result in self.results:
            grouped.setdefault(result.op, []).append(result)
        return grouped

    def checks(self) -> list[str]:
        """Return the names of the checks that have results, in the order of their first result."""
        return list(dict.fromkeys(result.check for result in self.results))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON. docs/reference/json.md documents its form."""
        counts = self.counts()
        return {
            "schema": 1,
            **asdict(self.header),
            "holds": self.holds,
            "seconds": round(self.seconds, 3),
            "counts": {state: counts[state] for state in STATES},
            "results": [asdict(result) for result in self.results],
        }
