"""Compiling small functions and comparing them with eager, and engines to do it with that compile nothing.

``StubEngine`` runs nodes one by one and refuses what a test names. ``interpreted_engine`` is the engine inductor
without its code generator: what schedules, cuts and shares runs for real, in milliseconds.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from dlinfer.graph.engine import CompiledRegion, Engine
from dlinfer.graph.functional.functionalize import Function, function_of, refusal
from dlinfer.graph.ir import callee
from dlinfer.graph.ir.dialect import is_compute, op_name
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.program import Program, RegionRun, Step
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report import report
from dlinfer.vendor.cpu.inductor import clusters
from dlinfer.vendor.cpu.inductor.engine import InductorEngine


class StubEngine(Engine):
    """Runs nodes by torch. ``refused``: names of ops it does not take. ``smallest``: nodes that a region needs."""

    name = "stub"

    def __init__(self, refused: Collection[str] = (), smallest: int = 0) -> None:
        self.refused = refused
        self.smallest = smallest
        self.regions: list[list[str]] = []

    def refuses(self, node: fx.Node) -> str | None:
        return f"the stub has no {op_name(node)}" if op_name(node) in self.refused else None

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        count = sum(map(is_compute, nodes))
        return f"{count} of {self.smallest} nodes" if count < self.smallest else None

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        graph = region.graph_module.graph
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self.regions.append([op_name(node) for node in calls])
        steps = [Step.of(node, "kernel", callee.reference(node.target)) for node in calls]
        return CompiledRegion(Program.of(region.graph_module, steps, self.resolve))

    def identity(self, cache_dir: Path) -> str:
        return "stub"


class ValueEngine(StubEngine):
    """As an engine without pointers: regions become functions of values, which torch runs."""

    def __init__(self, refused: Collection[str] = ()) -> None:
        super().__init__(refused)
        self.functions: list[Function] = []

    def refuses(self, node: fx.Node) -> str | None:
        return super().refuses(node) or refusal(node)

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        function = function_of(region)
        self.functions.append(function)
        return CompiledRegion(ValueRun(function))


class ValueRun(RegionRun):
    """Runs a function as an engine does: fresh contiguous results, new contents into the inputs' memory."""

    source = "by torch"

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        self.function.check(inputs)
        assert self.function.conflict(inputs) is None
        given = [one.contiguous() if isinstance(one, torch.Tensor) else one for one in inputs]
        results = _AsFakes(self.function.graph_module).run(*given)
        made = [one.clone(memory_format=torch.contiguous_format) for one in results]
        for index, value in zip(self.function.writes, made, strict=True):
            if index is not None:
                inputs[index].copy_(value)
        return self.function.finish(inputs, made)


class _AsFakes(fx.Interpreter):
    """Runs a function, whose nodes give what their fakes say: a lowering believes them."""

    def run_node(self, n: fx.Node) -> Any:
        result, said = super().run_node(n), n.meta.get("val")
        if isinstance(result, torch.Tensor) and isinstance(said, torch.Tensor):
            assert (result.dtype, result.dim()) == (said.dtype, said.dim()), n.format_node()
            for size, wanted in zip(result.shape, said.shape, strict=True):
                assert not isinstance(wanted, int) or size == wanted, n.format_node()
        return result


def interpreted_engine(monkeypatch: pytest.MonkeyPatch) -> InductorEngine:
    """The engine inductor, whose clusters run node by node as decomposed."""
    monkeypatch.setattr(clusters.inductor, "compile_loops", lambda graph, fakes, mode: graph)
    return InductorEngine()


def use_engine(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Let every compilation of this test find ``engine``."""
    monkeypatch.setattr("dlinfer.graph.backend.find_engine", lambda name, device: engine)


def compiled(
    function: Callable[..., Any], *, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """``torch.compile`` by the backend."""
    return torch.compile(function, backend="dlinfer", dynamic=dynamic, options=options)


def last_report() -> report.GraphReport:
    """The report of the latest compilation."""
    return report.reports()[-1]


def same_as_eager(function: Callable[..., Any], *args: Any, calls: int = 2, **options: Any) -> None:
    """Call a function eagerly and compiled, each on a copy of its own, and compare all that a caller can see.

    Each call gives equal results from equal seeds, leaves arguments, buffers and the random generator equal, and
    writes into a result afterwards reach the same tensors.
    """
    ours, theirs = copy.deepcopy((function, args)), copy.deepcopy((function, args))
    run = compiled(ours[0], **options)
    for seed in range(calls):
        with torch.no_grad():
            torch.manual_seed(seed)
            expected, want_state = theirs[0](*theirs[1]), torch.get_rng_state()
            torch.manual_seed(seed)
            given, state = run(*ours[1]), torch.get_rng_state()
        seen = [(given, expected), (ours[1], theirs[1])]
        if isinstance(function, nn.Module):
            seen.append((_state(ours[0]), _state(theirs[0])))
        _assert_equal(seen)
        assert torch.equal(state, want_state)
        _write_into(given)
        _write_into(expected)
        _assert_equal(seen)


def _state(module: Any) -> dict[str, torch.Tensor]:
    return module.state_dict()


def _assert_equal(pairs: Sequence[tuple[Any, Any]]) -> None:
    for given, expected in pairs:
        torch.testing.assert_close(given, expected, equal_nan=True, check_stride=True)


def _write_into(results: Any) -> None:
    for number, leaf in enumerate(pytree.tree_leaves(results)):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided:
            leaf.add_(number + 1)
