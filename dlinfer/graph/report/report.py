"""The report of each compiled graph, as plain data for ``dlinfer.explain``, ``DLINFER_DEBUG`` and JSON."""

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
"""The cause of a function's first compilation."""

LOADED = "loaded from the disk cache"
"""The cause in the report of a graph that this process loaded and did not compile."""


@dataclass
class NodeReport:
    """One call in the final graph, and where it runs.

    place: ``engine``, ``eager``, ``view`` or ``size``.
    how: the kernel or cluster that runs the node.
    reason: the reason why the node is not in the engine.
    line: the line of the model's source.
    result: the dtype and sizes of the result.
    reads: names of the operands.
    module: path of the module that created the node, such as ``layers.0.mlp``.
    flops: floating-point operations of a product (``dlinfer.graph.ir.flops``).
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
        """Where the node runs, as text: the kernel or cluster, ``eager: REASON``, or ``place``."""
        return f"eager: {self.reason}" if self.place == "eager" else self.how or self.place


@dataclass
class InputReport:
    """One input of a graph.

    weight: whether the input is the same tensor at each call and never written, as a parameter is.
    sizes: the input's sizes as text: numbers or symbols.
    written: whether the graph writes into the input.
    """

    name: str
    result: str
    weight: bool
    sizes: tuple[str, ...] = ()
    written: bool = False


@dataclass
class ClusterReport:
    """One group of nodes that is compiled as a unit.

    uses: how often the graph runs the group.
    origin: where the compiled code comes from: ``compiled`` for this graph, loaded from ``disk``, or ``shared`` with an
        earlier graph of this process. It is ``eager`` if compiling failed; then ``reason`` has the error.
    """

    key: str
    nodes: int
    uses: int
    seconds: float
    origin: str
    reason: str = ""


@dataclass
class RegionReport:
    """One region of a graph that an engine compiled.

    notes: facts, a sentence each, such as the weights that the region holds. The list may grow while the region
        runs.
    """

    name: str
    engine: str
    nodes: int
    clusters: list[ClusterReport] = field(default_factory=list[ClusterReport])
    source: str = ""
    notes: list[str] = field(default_factory=list[str])


@dataclass
class GraphReport:
    """The report of one captured graph.

    model: the function that was captured, as ``function (file:line)``.
    cause: the reason for compiling the graph: ``first call``, or Dynamo's reason for a recompilation.
    variant: dimensions of inputs (``x[0]``) that Dynamo specialized to size 1; empty for the generic graph.
    captured, lowered: the graph as text before and after the passes.
    symbols: symbolic size -> its range and its source.
    guards: assumptions about sizes.
    seconds: stage of the compilation -> seconds.
    memory: name -> bytes. The names are ``weights``, ``written inputs`` (KV caches), ``held`` (constants of the
        compiled graph), and ``peak before`` and ``peak after`` (of the process).
    refused: the reason why the graph could not be captured and runs without dlinfer.
    not_loaded: the differences between this graph and the nearest entry of the disk cache.
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
        """Return whether a size is 1 in this graph, but not in an earlier graph of the same function.

        ``cause`` does not show this, because Dynamo compares with one of the earlier graphs only.
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
        """Name and file of the captured function, without the line."""
        return self.model.rpartition(":")[0]

    def placed(self, place: str) -> list[NodeReport]:
        return [node for node in self.nodes if node.place == place]

    def flops(self, place: str) -> int:
        return sum(node.flops for node in self.placed(place))

    def rules(self) -> dict[str, int]:
        """Return fusion rule -> how often the rule fired, without rules that never fired."""
        plain = (REMOVE_NOOPS.name, CSE.name, DCE.name)
        return {item.name: len(item.edits) for item in self.passes if item.edits and item.name not in plain}

    def kernels(self) -> dict[str, int]:
        """Return kernel -> how many nodes it runs, the most frequent kernel first."""
        how = (node.how.removeprefix("kernel ") for node in self.nodes if node.how.startswith("kernel "))
        return dict(Counter(how).most_common())

    def refusals(self) -> dict[tuple[str, str], list[NodeReport]]:
        """Return a mapping from pairs (op, reason) to the nodes of this op that run eagerly for this reason."""
        nodes: dict[tuple[str, str], list[NodeReport]] = {}
        for node in self.placed("eager"):
            nodes.setdefault((node.op, node.reason), []).append(node)
        return nodes

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GraphReport":
        """Restore a report from the result of ``to_dict``, even if it was written to JSON and read back."""
        return _read(cls, data)


_types_of = functools.cache(get_type_hints)
_SEQUENCES: tuple[object, ...] = (list, tuple)


def _read(kind: Any, data: Any) -> Any:
    """Return data from JSON as an object of type ``kind``: a dataclass, a list or tuple, or plain data."""
    make: Any = get_origin(kind) or kind
    if is_dataclass(kind):
        types = _types_of(kind)
        return make(**{name: _read(types[name], value) for name, value in dict(data).items()})
    if make in _SEQUENCES:
        return make(_read(get_args(kind)[0], item) for item in data)
    return data


_lock = threading.Lock()
_reports: deque[GraphReport] = deque(maxlen=1000)  # bounded: a server may compile again and again
_numbers = itertools.count()


def record(report: GraphReport) -> GraphReport:
    """Number a report, and keep it for ``reports``."""
    with _lock:
        report.index = next(_numbers)
        _reports.append(report)
    return report


def reports() -> list[GraphReport]:
    """Return the reports of this process's latest compilations, 1,000 at most, oldest first."""
    with _lock:
        return list(_reports)


def reset() -> None:
    global _numbers
    with _lock:
        _numbers = itertools.count()
        _reports.clear()
