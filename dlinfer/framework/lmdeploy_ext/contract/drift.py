"""Defines the comparison's findings: the schema of ``dlinfer contract --json`` (docs/reference/json.md)."""

from dataclasses import dataclass, field
from typing import Literal

SCHEMA = 1

Severity = Literal["essential", "optional"]
Kind = Literal[
    "missing",
    "misbinding",
    "unknown keyword",
    "changed call",
    "no longer used",
    "changed signature",
    "new method",
    "new BuildSpec",
    "removed BuildSpec",
    "new field",
    "removed field",
    "new meaning suspected",
    "new use of CUDA",
]


@dataclass(frozen=True)
class Drift:
    """One difference between LMDeploy and this package.

    kind: the kind of difference. severity: essential if the device would not start, or might give other tokens;
        optional if the device works without the missing part.
    where: ``file:line`` in LMDeploy's folder, or in ``dlinfer/...`` for a name that our adaptor takes from LMDeploy.
    used: what one side uses. offered: what the other side has. next_step: what to do about the difference.
    """

    kind: Kind
    severity: Severity
    where: str
    used: str
    offered: str
    next_step: str


@dataclass(frozen=True)
class Elsewhere:
    """A name or call of LMDeploy's that does not fit this package, in code that the checked device never runs.

    name: the ``dlinfer`` name, followed by the kind of difference if ``dlinfer`` has that name. where: ``file:line``.
    device: the only device that runs this code, or empty. reason: why the checked device does not run it.
    """

    name: str
    where: str
    device: str
    reason: str


@dataclass(frozen=True)
class Looked:
    """How many names, calls and other things were compared.

    names: ``dlinfer`` names that LMDeploy imports. calls: LMDeploy's calls of ``dlinfer``. specs: BuildSpecs.
    patches: our patches. methods: methods of our classes that extend LMDeploy's. imports: our imports from LMDeploy.
    """

    names: int
    calls: int
    specs: int
    patches: int
    methods: int
    imports: int


@dataclass(frozen=True)
class Report:
    """The whole comparison.

    schema: the version of this format. lmdeploy: the version of the source. source: its folder.
    device: the device type. admitted: whether the version is inside the adaptor's tested range.
    record: the version of the record that was compared: the source's own version, or the nearest one with a record.
    drifts: the differences, essential ones first. elsewhere: differences in code that the device never runs.
    """

    schema: int
    lmdeploy: str
    source: str
    device: str
    admitted: bool
    record: str
    looked: Looked
    drifts: list[Drift] = field(default_factory=list)
    elsewhere: list[Elsewhere] = field(default_factory=list)

    @property
    def essential(self) -> bool:
        """Whether any drift is essential."""
        return any(drift.severity == "essential" for drift in self.drifts)
