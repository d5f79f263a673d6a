"""The report of each compiled graph: plain data behind ``dlinfer.explain`` and ``DLINFER_DEBUG``, and JSON."""

import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.pipeline import PassReport
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS

FIRST_CALL = "first call"
"""The cause of a compilation that no earlier one preceded."""

LOADED = "loaded from the disk cache"
"""The cause of a graph that was not compiled in this process."""


@dataclass
class NodeReport:
    """One node of the final graph and where it runs.

    place: ``engine``, ``eager``, ``view``, ``size`` or ``input``. how: the kernel or cluster that runs it.
    reason: why it is not in the engine. line: the model's. result: dtype and sizes. module: path of the module whose
    code it came from, ``layers.0.mlp``. flops: floating-point operations of a product (``dlinfer.graph.ir.flops``).
    """

    name: str
    op: str
    place: str
    how: str
    reason: str
    line: str
    result: str
    reads: tuple[str, ...]
    module: str = ""
    flops: int = 0

    @property
    def where(self) -> str:
        """Where it runs, in words: its kernel or cluster, or that it runs eagerly and why."""
        return f"eager: {self.reason}" if self.place == "eager" else self.how or self.place


@dataclass
class InputReport:
    """One input of a graph.

    weight: a parameter or buffer that is the same tensor at each call and never written. sizes: as numbers or symbols.
    written: whether the graph writes into it.
    """

    name: str
    result: str
    weight: bool
    sizes: tuple[str, ...] = ()
    written: bool = False


@dataclass
class ClusterReport:
    """One group of nodes compiled as a unit; ``uses`` counts how often the graph runs it.

    origin: ``compiled`` now, ``disk`` from the cache, ``shared`` with an earlier graph of this process, ``eager``
    where compiling it failed (``reason`` says why).
    """

    key: str
    nodes: int
    uses: int
    seconds: float
    origin: str
    reason: str = ""


@dataclass
class RegionReport:
    """One part of a graph that an engine took, or refused as too small (``reason``).

    notes: further sentences of the engine, also while it runs: which weights it holds, when they changed.
    """

    name: str
    engine: str
    nodes: int
    reason: str = ""
    clusters: list[ClusterReport] = field(default_factory=list[ClusterReport])
    source: str = ""
    notes: list[str] = field(default_factory=list[str])


@dataclass
class GraphReport:
    """One captured graph: from Dynamo's call to what runs.

    cause: why it was compiled: ``first call`` or Dynamo's reason for a recompilation.
    variant: the inputs whose size 1 Dynamo took as a constant; empty for the generic graph.
    captured, lowered: the graph as text before and after the passes. symbols: symbolic size -> range and source.
    guards: assumptions about sizes. seconds: stage -> seconds.
    memory: bytes of ``weights``, of ``written inputs`` (KV caches), of tensors that the compiled graph ``held``
    (constants, copies of weights), and the process's ``peak before`` and ``peak after``.
    refused: why the graph could not be captured and runs without dlinfer.
    not_loaded: how the nearest entry of the disk cache differs from it.
    """

    model: str
    index: int
    engine: str
    cause: str = FIRST_CALL
    variant: tuple[str, ...] = ()
    captured: str = ""
    lowered: str = ""
    passes: list[PassReport] = field(default_factory=list[PassReport])
    inputs: list[InputReport] = field(default_factory=list[InputReport])
    nodes: list[NodeReport] = field(default_factory=list[NodeReport])
    outputs: tuple[str, ...] = ()
    regions: list[RegionReport] = field(default_factory=list[RegionReport])
    symbols: dict[str, str] = field(default_factory=dict[str, str])
    guards: list[str] = field(default_factory=list[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    memory: dict[str, int] = field(default_factory=dict[str, int])
    refused: str = ""
    not_loaded: str = ""

    def is_size_1_variant(self, earlier: Iterable["GraphReport"]) -> bool:
        """Whether it has a size of 1 where an earlier graph of the same function takes another size.

        Dynamo's cause does not tell: it names what differs from one of the earlier graphs only.
        """
        return any(
            size != "1" and f"{item.name}[{dim}]" in self.variant
            for graph in earlier
            if graph.function == self.function
            for item in graph.inputs
            for dim, size in enumerate(item.sizes)
        )

    @property
    def function(self) -> str:
        """Name and file of the function that it was captured from, without the line."""
        return self.model.rpartition(":")[0]

    def placed(self, place: str) -> list[NodeReport]:
        """Its nodes at one place."""
        return [node for node in self.nodes if node.place == place]

    def flops(self, place: str) -> int:
        """Floating-point operations of products at one place."""
        return sum(node.flops for node in self.placed(place))

    def rules(self) -> dict[str, int]:
        """Fusion rule -> how often it fired, without those that never did."""
        plain = (REMOVE_NOOPS.name, CSE.name, DCE.name)
        return {item.name: len(item.edits) for item in self.passes if item.edits and item.name not in plain}

    def kernels(self) -> dict[str, int]:
        """Kernel -> how many nodes it runs, the most frequent first."""
        how = (node.how.removeprefix("kernel ") for node in self.nodes if node.how.startswith("kernel "))
        return dict(Counter(how).most_common())

    def refusals(self) -> dict[tuple[str, str], list[NodeReport]]:
        """(op, reason) -> the nodes that run eagerly for it."""
        nodes: dict[tuple[str, str], list[NodeReport]] = {}
        for node in self.placed("eager"):
            nodes.setdefault((node.op, node.reason), []).append(node)
        return nodes

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GraphReport":
        """Read what ``to_dict`` gave, also after a way through JSON."""
        return _read(cls, data)


_types_of = functools.cache(get_type_hints)
_SEQUENCES: tuple[object, ...] = (list, tuple)


def _read(kind: Any, data: Any) -> Any:
    """JSON as an object of a type: a dataclass, a list or tuple of one, or plain data."""
    make: Any = get_origin(kind) or kind
    if is_dataclass(kind):
        types = _types_of(kind)
        return make(**{name: _read(types[name], value) for name, value in dict(data).items()})
    if make in _SEQUENCES:
        return make(_read(get_args(kind)[0], item) for item in data)
    return data


_lock = threading.Lock()
_reports: deque[GraphReport] = deque(maxlen=1000)  # a server that compiles again and again must not grow
_numbers = itertools.count()


def record(report: GraphReport) -> GraphReport:
    """Keep a report of a compilation in this process, and number it."""
    with _lock:
        report.index = next(_numbers)
        _reports.append(report)
    return report


def reports() -> list[GraphReport]:
    """The latest compilations of this process, 1,000 at most, in order."""
    with _lock:
        return list(_reports)


def reset() -> None:
    """Forget all reports."""
    global _numbers
    with _lock:
        _numbers = itertools.count()
        _reports.clear()
