"""Compile each distinct cluster once, for all layers and graphs that repeat it.

A cluster is a group of pointwise ops and reductions that inductor compiles together.
"""

import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.graph.cache.fingerprint import Environment, environment
from dlinfer.graph.cache.key import Key, canonical_text, digest
from dlinfer.graph.ir.dialect import Bare, attribute, fake
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.layout import dense_order, laid_out
from dlinfer.graph.report.report import ClusterReport
from dlinfer.graph.torch_private import fake_mode, inductor, symbols
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor.fusible import decompositions
from dlinfer.vendor.cpu.inductor.small_work import Measure, by_one_thread, measure_of
from dlinfer.vendor.cpu.inductor.twins import Twins, twins_of


@dataclass
class _Compiled:
    """A cluster that is compiled, or whose nodes run one by one.

    assumptions: guards on sizes that the compiler added.
    origin: "compiled", "disk", or "eager" if the nodes run one by one.
    reason: why they run one by one.
    stored: whether it is on disk.
    measure: the rule for calls with so little work that one thread runs them; None if all threads run every call."""

    run: Callable[..., Any]
    assumptions: list[str]
    origin: str
    reason: str = ""
    stored: bool = False
    measure: Measure | None = None

    @property
    def origin_again(self) -> str:
        """The origin in reports of later uses: "shared", or still "eager" for a cluster whose nodes run one by one."""
        return self.origin if self.origin == "eager" else "shared"


class ClusterCompiler:
    """Compiles subgraphs of loops and keeps the results, in this process and on disk."""

    def __init__(self) -> None:
        self._compiled: dict[str, _Compiled] = {}
        self._runs: dict[str, Callable[..., Any]] = {}
        self._traced: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def run(self, name: str) -> Callable[..., Any]:
        """Return the function of a cluster, from its inputs to its outputs. name: what ``compile`` returned."""
        return self._runs[name]

    def load(self, name: str, cache: ArtifactCache) -> bool:
        """Load a cluster from the disk cache, for ``run(name)``.

        Return False if the cache holds no sound artifact of it. An artifact with assumptions about sizes counts as
        missing, because nothing would check these assumptions here."""
        with self._lock:
            known = self._compiled.get(name) or cache.load_named(name, _read)
            if known is None or known.assumptions or known.origin == "eager":
                return False
            self._add(name, known)
            return True

    def keeps(self, name: str) -> bool:
        """Return whether ``load`` will find this cluster in another process."""
        known = self._compiled[name]
        return known.stored and not known.assumptions

    def compile(
        self, subgraph: Subgraph, cache: ArtifactCache, refused: str | None = None
    ) -> tuple[str, ClusterReport]:
        """Compile a subgraph, or find an equal one that is compiled. Return the name for ``run``, and a report.

        refused: a reason not to trust compiled loops on this CPU; the subgraph's nodes then run one by one. None if
            compiled loops are trusted."""
        start = time.perf_counter()
        surroundings = _Surroundings(environment(), code_generator())
        spelling = digest(canonical_text([surroundings.text, *spelled(subgraph.graph_module)]))
        with self._lock:
            if spelling in self._traced:
                key, nodes = self._traced[spelling]
                known = self._compiled[key]
                if not known.assumptions:
                    seconds = time.perf_counter() - start
                    return key, ClusterReport(key, nodes, 1, seconds, known.origin_again, known.reason)
            placeholders = subgraph.graph_module.graph.find_nodes(op="placeholder")
            twins = twins_of([fake(node) for node in placeholders])
            graph = fake_mode.trace_decomposed(
                _as_laid_out(subgraph), twins.values, twins.mode, decompositions()
            )
            _drop_dead_constants(graph)
            name, origin = self._fitting(
                cluster_key(graph, twins, surroundings), graph, twins, cache, refused
            )
            nodes = sum(1 for node in graph.graph.nodes if node.op == "call_function")
            self._traced[spelling] = (name, nodes)
            report = ClusterReport(
                name, nodes, 1, time.perf_counter() - start, origin, self._compiled[name].reason
            )
            return name, report

    def _add(self, name: str, compiled: _Compiled) -> None:
        self._compiled[name] = compiled
        self._runs[name] = by_one_thread(compiled.run, compiled.measure)

    def _fitting(
        self, first: Key, graph: fx.GraphModule, twins: Twins, cache: ArtifactCache, refused: str | None
    ) -> tuple[str, str]:
        """Find or make a compilation of ``graph`` whose assumptions hold for the model's sizes.

        Return the compilation's name and origin. One graph may be compiled several times under different assumptions.
        These compilations are variants 0, 1, 2, ... of one key.
        first: the key of variant 0.
        twins: the fake inputs of ``graph``. Their sizes have fresh symbols in place of the model's."""
        for variant in itertools.count():
            key = replace(first, variant=variant)
            name = key.name
            known = self._compiled.get(name)
            new = known is None
            if known is None and refused is not None:
                known = _Compiled(node_by_node(graph), twins.assumptions(), "eager", refused)
            elif known is None:
                known = cache.load(key, _read) or _compile(graph, twins, key, cache)
            if new:
                self._add(name, known)
            if twins.holds(known.assumptions):
                return name, known.origin if new else known.origin_again
            if new and known.origin == "compiled":
                raise AssertionError(f"a compilation does not fit its own sizes: {known.assumptions}")
        raise AssertionError("unreachable")


def _drop_dead_constants(graph: fx.GraphModule) -> None:
    """Remove constants that no result depends on, because a cluster with constants cannot be stored.

    Hugging Face's DynamicCache starts with empty constants. The decomposition of ``cat`` leaves them out.
    """
    constants = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    if constants and graph.graph.eliminate_dead_code():
        for name in constants - {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}:
            delattr(graph, name)  # torch would make an unused constant an input of the code
        graph.recompile()


def _as_laid_out(subgraph: Subgraph) -> Callable[..., Any]:
    """Return a function that runs a subgraph and gives each result the strides of its fake tensor.

    Decompositions may return other strides.
    """
    return _in_layouts(subgraph.graph_module, map(fake, subgraph.outputs))


def node_by_node(graph: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that runs a graph's ops one by one and gives each result the strides of its fake tensor.

    Other steps rely on these strides.
    """
    (outputs,) = graph.graph.output_node().args
    assert isinstance(outputs, (list, tuple))
    return _in_layouts(graph, (fake(node) if isinstance(node, fx.Node) else node for node in outputs))


def _in_layouts(function: Callable[..., Any], values: Iterable[Any]) -> Callable[..., Any]:
    """Wrap a function so that its result number i gets the memory order of dimensions of ``values[i]``."""
    orders = [dense_order(value) if isinstance(value, torch.Tensor) else None for value in values]

    def run(*inputs: Any) -> tuple[Any, ...]:
        return tuple(
            result if order is None or dense_order(result) == order else laid_out(result, order)
            for result, order in zip(function(*inputs), orders, strict=True)
        )

    return run


@dataclass(frozen=True)
class _Surroundings:
    environment: Environment
    code_generator: Mapping[str, Any]

    @property
    def text(self) -> str:
        return canonical_text([self.environment, self.code_generator])


def code_generator() -> dict[str, Any]:
    """Return all that identifies the code generator: the compiler, and inductor's configuration."""
    everything, unlike = inductor.configuration()
    return {
        "compiler": inductor.compiler(),
        "settings": unlike,
        "all_settings": digest(canonical_text(everything)),
    }


def spelled(graph_module: fx.GraphModule) -> list[str]:
    """Return a graph as lines of text. Graphs that differ only in names of nodes and symbols have equal lines.

    Comparing lines is cheap, so a layer that repeats an earlier layer need not be traced again.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    ranges = symbols.symbol_ranges([fake(node) for node in placeholders])
    seen: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        name = match.group()
        if name not in seen:
            seen[name] = f"{name[0]}_{len(seen)}:{ranges.get(name)}"
        return seen[name]

    inputs = [symbols.SYMBOL.sub(renamed, _shown(fake(node))) for node in placeholders]
    return [*inputs, *_calls(graph_module)]


def cluster_key(graph: fx.GraphModule, twins: Twins, surroundings: _Surroundings) -> Key:
    """Return a cluster's key: its ops, and its inputs' dtypes, sizes, strides and ranges of symbols.

    surroundings: the environment (versions, CPU) and the code generator, which are also parts of the key.
    """
    ranges = sorted(symbols.symbol_ranges(twins.values).items())
    content = (*map(_shown, twins.values), *(f"{name}: {limits}" for name, limits in ranges), *_calls(graph))
    return Key(
        kind="cluster",
        subject=digest(canonical_text(content)),
        environment=surroundings.environment,
        content=content,
        device="cpu",
        engine="inductor",
        engine_identity=surroundings.code_generator,
    )


def _calls(graph_module: fx.GraphModule) -> Iterator[str]:
    """Yield a line for each node that is no input. The lines refer to other nodes by number, not by name."""
    names: dict[fx.Node, str] = {}
    for index, node in enumerate(graph_module.graph.nodes):
        names[node] = f"%{index}"
        if node.op == "placeholder":
            continue
        arguments = map_arg((node.args, node.kwargs), lambda parent: Bare(names[parent]))
        yield f"{node.op} {node.target} {arguments}"
        if node.op == "get_attr":
            yield _constant(attribute(graph_module, str(node.target)))


def _compile(graph: fx.GraphModule, twins: Twins, key: Key, cache: ArtifactCache) -> _Compiled:
    try:
        artifact = _loops(graph, twins)
    # After any error of inductor the nodes run one by one, and the error is reported.
    except Exception as cause:  # noqa: BLE001
        reason = (
            f"inductor: {type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"
        )
        return _Compiled(node_by_node(graph), twins.assumptions(), "eager", reason)
    compiled = _Compiled(artifact, twins.assumptions(), "compiled", measure=measure_of(graph))
    # torch saves a graph without the graph's own tensors. A loaded graph takes them as inputs.
    if not graph.graph.find_nodes(op="get_attr"):
        compiled.stored = cache.store(key, lambda: _written(compiled))
    return compiled


def _loops(graph: fx.GraphModule, twins: Twins) -> Any:
    """Compile a cluster. Compile it once more if a library of inductor's cache was damaged."""
    with native.memory_for_results():
        try:
            return inductor.compile_loops(graph, twins.values, twins.mode)
        except Exception as error:
            if not inductor.remove_damaged_library(error):
                raise
        return inductor.compile_loops(graph, twins.values, twins.mode)


def _written(compiled: _Compiled) -> bytes:
    """Serialise a compiled cluster: a line of JSON with assumptions and measure, followed by torch's own bytes."""
    known = [compiled.assumptions, compiled.measure and astuple(compiled.measure)]
    return json.dumps(known).encode() + b"\n" + inductor.save_loops(compiled.run)


def _read(contents: bytes) -> _Compiled:
    known, _, artifact = contents.partition(b"\n")
    assumptions, measure = json.loads(known)
    with native.memory_for_results():
        run = inductor.load_loops(artifact)
    return _Compiled(run, assumptions, "disk", stored=True, measure=measure and Measure(*measure))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return f"{type(value).__name__} {value}"


def _constant(value: torch.Tensor) -> str:
    flat = value.detach().contiguous().flatten()
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{_shown(value)} {hashlib.sha256(content).hexdigest()}"
