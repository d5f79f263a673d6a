"""The fields of an explanation: reports of compilations, and the figures computed from them."""

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dlinfer.graph.ir.flops import share
from dlinfer.graph.report.report import FIRST_CALL, LOADED, GraphReport

SCHEMA = 2


@dataclass(frozen=True)
class GraphBreak:
    """A graph break of Dynamo.

    reason: the first line of Dynamo's message. advice: the message's explanation and hints.
    """

    reason: str
    advice: str
    line: str
    count: int


@dataclass
class Facts:
    """The reports of some compilations.

    model: the name of the explained model. graphs: one report for each graph, in order of compilation.
    graph_breaks: Dynamo's graph breaks. seconds: how long the explained calls took, compilation included.
    cache: how often each kind of disk cache event happened. versions: the versions of dlinfer, torch and Python.
    """

    model: str
    graphs: list[GraphReport] = field(default_factory=list[GraphReport])
    graph_breaks: list[GraphBreak] = field(default_factory=list[GraphBreak])
    seconds: float = 0.0
    cache: dict[str, int] = field(default_factory=dict[str, int])
    versions: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def recompiles(self) -> list[GraphReport]:
        """The graphs that Dynamo compiled because the guards of earlier graphs failed.

        ``cause`` of a graph names the guard.

        The list omits variants for a size of 1: see ``size_1_variants``.
        """
        return [graph for graph in self.graphs if self.kind_of(graph) == "recompile"]

    @property
    def size_1_variants(self) -> list[GraphReport]:
        """The graphs that were recompiled because a size was 1. Dynamo always specializes a size of 1."""
        return [graph for graph in self.graphs if self.kind_of(graph) == "size-1 variant"]

    def kind_of(self, graph: GraphReport) -> str:
        """Return ``first call``, ``loaded from the disk cache``, ``recompile`` or ``size-1 variant``."""
        if graph.cause in (FIRST_CALL, LOADED):
            return graph.cause
        earlier = [other for other in self.graphs if other.index < graph.index]
        return "size-1 variant" if graph.is_size_1_variant(earlier) else "recompile"

    @property
    def fired(self) -> dict[str, int]:
        """Fusion rule -> how often the rule fired, over all graphs."""
        counts: Counter[str] = Counter()
        for graph in self.graphs:
            counts.update(graph.rules())
        return dict(counts)

    @property
    def coverage(self) -> float:
        """The engine's share of the nodes, not counting views and arithmetic on sizes; 0 if nothing was captured.

        It is 1 if the captured graphs have only views and arithmetic on sizes.
        """
        inside = sum(len(graph.placed("engine")) for graph in self.graphs)
        outside = sum(len(graph.placed("eager")) for graph in self.graphs)
        if inside + outside == 0:
            return 0.0 if not self.graphs or any(graph.refused for graph in self.graphs) else 1.0
        return inside / (inside + outside)

    @property
    def flop_coverage(self) -> float:
        """The engine's share of the floating-point operations of all matrix products; 0 if nothing was captured."""
        inside = sum(graph.flops("engine") for graph in self.graphs)
        outside = sum(graph.flops("eager") for graph in self.graphs)
        return share(inside, outside) if self.coverage or inside + outside else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the reports and the figures as a dict that JSON can hold.

        docs/reference/json.md describes the keys.
        """
        plain = {item.name: getattr(self, item.name) for item in fields(Facts)}
        plain |= {name: [asdict(item) for item in plain[name]] for name in ("graphs", "graph_breaks")}
        figures: dict[str, Any] = {
            "fired": self.fired,
            "coverage": self.coverage,
            "flop_coverage": self.flop_coverage,
        }
        for name in ("recompiles", "size_1_variants"):
            figures[name] = [graph.index for graph in getattr(self, name)]
        return {"schema": SCHEMA, **plain, **figures}
