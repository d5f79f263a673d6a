"""Compiling clusters: each distinct one once, shared by the layers and graphs that repeat it."""

import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph import torch_seam
from dlinfer.graph.cache import ArtifactCache
from dlinfer.graph.dialect import fake
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.program import attribute
from dlinfer.graph.report import ClusterReport
from dlinfer.graph.twins import Twins, twins_of
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor.fusible import decompositions


@dataclass
class _Compiled:
    """A compiled cluster, and what compiling it assumed about its symbols."""

    run: Callable[..., Any]
    assumptions: list[str]
    origin: str
    reason: str = ""
    stored: bool = False

    @property
    def origin_again(self) -> str:
        """What to report of a second cluster that uses it: one that runs eagerly does so wherever it is met."""
        return self.origin if self.origin == "eager" else "shared"


class ClusterCompiler:
    """Compiles subgraphs of loops and keeps what it compiled, in this process and on disk."""

    def __init__(self) -> None:
        self._compiled: dict[str, _Compiled] = {}
        self._runs: dict[str, Callable[..., Any]] = {}
        self._traced: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def run(self, name: str) -> Callable[..., Any]:
        """The callable of a name that ``compile`` gave: from a cluster's inputs to the sequence of its outputs."""
        return self._runs[name]

    def load(self, name: str, cache: ArtifactCache) -> bool:
        """Make ``run(name)`` possible from the disk cache alone; False where that holds no sound artifact.

        One that assumes something of its sizes is not for callers without guards, and counts as not there.
        """
        with self._lock:
            known = self._compiled.get(name) or _load(name, cache)
            if known is None or known.assumptions or known.origin == "eager":
                return False
            self._compiled[name] = known
            self._runs[name] = known.run
            return True

    def keeps(self, name: str) -> bool:
        """Whether ``load`` will find this cluster in another process."""
        known = self._compiled[name]
        return known.stored and not known.assumptions

    def compile(
        self, subgraph: Subgraph, cache: ArtifactCache, refused: str | None = None
    ) -> tuple[str, ClusterReport]:
        """Compile a subgraph, or find one like it: (name for ``run``, report).

        refused: why compiled loops are not to be trusted here; then it runs node by node.
        """
        start = time.perf_counter()
        spelling = hashlib.sha256(canonical_text(subgraph.graph_module).encode()).hexdigest()
        with self._lock:
            if spelling in self._traced:
                key, nodes = self._traced[spelling]
                known = self._compiled[key]
                if not known.assumptions:
                    seconds = time.perf_counter() - start
                    return key, ClusterReport(key, nodes, 1, seconds, known.origin_again, known.reason)
            placeholders = subgraph.graph_module.graph.find_nodes(op="placeholder")
            twins = twins_of([fake(node) for node in placeholders])
            graph = torch_seam.trace_decomposed(
                subgraph.graph_module, twins.values, twins.mode, decompositions()
            )
            key = cluster_key(graph, twins)
            if refused is not None:
                self._compiled[key] = _Compiled(graph, [], "eager", refused)
                self._runs[key] = graph
            name, origin = self._fitting(key, graph, twins, cache)
            nodes = sum(1 for node in graph.graph.nodes if node.op == "call_function")
            self._traced[spelling] = (name, nodes)
            report = ClusterReport(
                name, nodes, 1, time.perf_counter() - start, origin, self._compiled[name].reason
            )
            return name, report

    def _fitting(
        self, key: str, graph: fx.GraphModule, twins: Twins, cache: ArtifactCache
    ) -> tuple[str, str]:
        """(name, origin) of what runs this graph: what a compilation assumed must be true of its sizes too."""
        for variant in itertools.count():
            name = f"{key}-{variant}" if variant else key
            known = self._compiled.get(name)
            new = known is None
            if known is None:
                known = _load(name, cache) or _compile(graph, twins, name, cache)
                self._compiled[name] = known
                self._runs[name] = known.run
            if twins.holds(known.assumptions):
                return name, known.origin if new else known.origin_again
            if new and known.origin == "compiled":
                raise AssertionError(f"a compilation does not fit its own sizes: {known.assumptions}")
        raise AssertionError("unreachable")


_SYMBOL = re.compile(r"\b[suz]\d+\b")


def canonical_text(graph_module: fx.GraphModule) -> str:
    """A graph as text that is equal for graphs that differ in names of nodes and symbols only.

    It is a cheap first look: a layer like one before need not be traced again to be recognised.
    """
    symbols: dict[str, str] = {}
    names: dict[fx.Node, str] = {}
    lines = [f"threads {torch.get_num_threads()}"]
    for index, node in enumerate(graph_module.graph.nodes):
        names[node] = f"%{index}"
        arguments = map_arg((node.args, node.kwargs), lambda parent: _Named(names[parent]))
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append(f"{node.op} {target} {arguments}")
        if node.op == "placeholder":
            lines.append(_shown(fake(node)))
        if node.op == "get_attr":
            lines.append(_constant(attribute(graph_module, target)))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    ranges = torch_seam.symbol_ranges([fake(node) for node in placeholders])

    def renamed(found: re.Match[str]) -> str:
        name = found.group()
        if name not in symbols:
            symbols[name] = f"{name[0]}_{len(symbols)}:{ranges.get(name)}"
        return symbols[name]

    return _SYMBOL.sub(renamed, "\n".join(lines))


def _load(key: str, cache: ArtifactCache) -> _Compiled | None:
    return cache.load(key, _read)


def _compile(graph: fx.GraphModule, twins: Twins, key: str, cache: ArtifactCache) -> _Compiled:
    try:
        with native.memory_for_results():
            artifact = torch_seam.compile_loops(graph, twins.values, twins.mode)
    # Whatever inductor stumbles over, the nodes still run one by one, and it is reported.
    except Exception as cause:  # noqa: BLE001
        reason = (
            f"inductor: {type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"
        )
        return _Compiled(graph, [], "eager", reason)
    compiled = _Compiled(artifact, twins.assumptions(), "compiled")
    compiled.stored = cache.store(key, compiled, _write)
    return compiled


def _write(compiled: _Compiled, path: str) -> None:
    """The assumptions as a line of JSON, then torch's own bytes."""
    plain = Path(path + ".artifact")
    torch_seam.save_loops(compiled.run, str(plain))
    Path(path).write_bytes(json.dumps(compiled.assumptions).encode() + b"\n" + plain.read_bytes())


def _read(path: str) -> _Compiled:
    assumptions, _, artifact = Path(path).read_bytes().partition(b"\n")
    plain = Path(path + ".artifact")
    plain.write_bytes(artifact)
    with native.memory_for_results():
        run = torch_seam.load_loops(str(plain))
    return _Compiled(run, json.loads(assumptions), "disk", stored=True)


def cluster_key(graph: fx.GraphModule, twins: Twins) -> str:
    """A hash of what a cluster computes: its ops, and its inputs' dtypes, sizes, strides and ranges of symbols."""
    names: dict[fx.Node, str] = {}
    lines = [_shown(value) for value in twins.values]
    lines.append(f"threads {torch.get_num_threads()}")  # loops are divided among them when compiled
    lines += [f"{name}: {limits}" for name, limits in sorted(torch_seam.symbol_ranges(twins.values).items())]
    for index, node in enumerate(graph.graph.nodes):
        names[node] = f"%{index}"
        arguments = map_arg((node.args, node.kwargs), lambda parent: _Named(names[parent]))
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append(f"{node.op} {target} {arguments}")
        if node.op == "get_attr":
            lines.append(_constant(attribute(graph, str(node.target))))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return f"{type(value).__name__} {value}"


def _constant(value: Any) -> str:
    return hashlib.sha256(repr((value.dtype, tuple(value.shape), value.tolist())).encode()).hexdigest()


class _Named(str):
    def __repr__(self) -> str:
        return str(self)
