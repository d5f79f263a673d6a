"""The findings of the comparison: the schema of ``dlinfer contract --json`` (docs/reference/json.md)."""

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
    """One thing that does not fit.

    kind: the kind of difference. severity: essential if the device would not start, or might give other tokens;
        optional if it does without.
    where: ``file:line`` in LMDeploy's folder, or in ours (``dlinfer/...``) for what we take of it.
    used: what LMDeploy, or our adaptor, uses. offered: what the other side has. next_step: what to do about it.
    """

    kind: Kind
    severity: Severity
    where: str
    used: str
    offered: str
    next_step: str


@dataclass(frozen=True)
class Elsewhere:
    """Something that LMDeploy asks for and this package lacks, which is not reached on the device that was asked about.

    name: what is asked for. where: ``file:line``. device: the device that reaches it, or empty if the reason is another
        one. reason: why it is not reached.
    """

    name: str
    where: str
    device: str
    reason: str


@dataclass(frozen=True)
class Looked:
    """How much was compared: LMDeploy's imports of ours, calls of our ops, BuildSpecs, patches, methods and names of
    LMDeploy's that our adaptor extends, and that it imports."""

    names: int
    calls: int
    specs: int
    patches: int
    methods: int
    imports: int


@dataclass(frozen=True)
class Report:
    """The whole comparison.

    schema: of this report. lmdeploy: the version of the source. source: its folder. device: the device type.
    admitted: whether the adaptor's tested range holds the version.
    record: the version whose recorded bodies, calls and BuildSpecs were compared; the source's own where there is one.
    drifts: what does not fit, essential first. elsewhere: what is not reached on the device, and is no drift there.
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
