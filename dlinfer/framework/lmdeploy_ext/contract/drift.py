"""Defines the findings of the comparison, and the schema of ``dlinfer contract --json`` (docs/reference/json.md)."""

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

    kind: the kind of difference.
    severity: essential if the device would not start, or might generate other tokens; else optional.
    where: ``file:line`` in LMDeploy's folder, or in ``dlinfer/...`` for a name that our adaptor imports from LMDeploy.
    used: the name, call or definition that one side relies on. offered: the other side's counterpart.
    next_step: the developer's next step.
    """

    kind: Kind
    severity: Severity
    where: str
    used: str
    offered: str
    next_step: str


@dataclass(frozen=True)
class Elsewhere:
    """A name or call of LMDeploy's that this package lacks or cannot take, in code that the checked device never runs.

    name: the ``dlinfer`` name that is missing, or, for another difference, the name and the kind of difference, such as
    ``dlinfer.ops.rms_norm: unknown keyword``. where: ``file:line``.
    device: the only device that runs this code; empty if no device is known. reason: the reason that the checked device
    does not run it.
    """

    name: str
    where: str
    device: str
    reason: str


@dataclass(frozen=True)
class Looked:
    """The numbers of compared things, by kind.

    names: ``dlinfer`` names that LMDeploy imports. calls: LMDeploy's calls of ``dlinfer``.
    specs: LMDeploy's BuildSpecs. patches: our patches. imports: our imports from LMDeploy.
    methods: methods of those of our classes that extend a class of LMDeploy's.
    """

    names: int
    calls: int
    specs: int
    patches: int
    methods: int
    imports: int


@dataclass(frozen=True)
class Report:
    """The result of one comparison.

    schema: the version of this report's format. lmdeploy: LMDeploy's version. source: the folder of LMDeploy's source.
    device: the device type. admitted: whether LMDeploy's version is inside the adaptor's tested range.
    record: the version of the record that the source was compared with. It is LMDeploy's version if that has a record.
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
