"""The graph engine ``inductor``: kernels called directly, everything between them in loops that inductor compiles.

A region becomes a program of steps. Library calls, dlinfer's attention and cache ops, writes and random draws are
steps of their own and stay in place, so no cache is cloned; the pointwise work and reductions between two of them
are one cluster. Weights are inputs: they are neither copied nor frozen, and an artifact on disk holds none.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from dlinfer.graph import torch_seam
from dlinfer.graph.cache import ArtifactCache, default_folder
from dlinfer.graph.dialect import is_compute, is_size, model_line
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.extract import Subgraph, extract_with_outputs
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.policy import leave_engine
from dlinfer.graph.program import Program, Step, constants_of, refer
from dlinfer.graph.report import ClusterReport
from dlinfer.vendor.cpu.inductor import kernels
from dlinfer.vendor.cpu.inductor.clusters import ClusterCompiler
from dlinfer.vendor.cpu.inductor.schedule import Cluster, schedule


class InductorEngine:
    """Graphs on CPU through torch's own code generator."""

    name = "inductor"

    def __init__(self) -> None:
        self._clusters = ClusterCompiler()

    def refuses(self, node: fx.Node) -> str | None:
        """Higher-order ops and other devices are not taken; every other op has a kernel."""
        if node.op == "call_function" and isinstance(node.target, torch_seam.HigherOrderOperator):
            return f"{node.target} is a higher-order op"
        return None

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """Entering costs nothing: kernels are called as they would be eagerly."""
        return None

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """The region as a program."""
        owner = region.graph_module
        result = CompiledRegion(run=None)
        cache = ArtifactCache(options.cache_dir or default_folder(), "inductor")
        # One elementary loop gains nothing from being compiled: ATen's kernel for it is as good.
        smallest = 1 if options.keeps_small_regions else 2
        steps: list[Step] = []
        for item in schedule(owner.graph, smallest=smallest):
            if isinstance(item, Cluster):
                steps.append(self._cluster_step(owner, item, cache, result, options))
            else:
                kind = "size" if is_size(item) else "kernel" if is_compute(item) else "view"
                steps.append(Step.of(item, kind, kernels.callee_of(item)))
                if kind == "kernel":
                    result.placement[item.name] = f"kernel {steps[-1].callee}"
        nodes = owner.graph.nodes
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        output = refer(owner.graph.output_node().args[0])
        result.run = Program(owner._get_name(), inputs, steps, output, self.resolve, constants_of(owner))
        return result

    def resolve(self, callee: str) -> Callable[..., Any]:
        """The function that a step of this engine's programs names."""
        kind, _, name = callee.partition(" ")
        return self._clusters.run(name) if kind == "cluster" else kernels.resolve(callee)

    def restore(self, callees: Collection[str], cache_dir: Path) -> None:
        """Load the clusters among ``callees`` from the disk cache. Raises KeyError where one is missing."""
        cache = ArtifactCache(cache_dir, "inductor")
        for callee in callees:
            kind, _, name = callee.partition(" ")
            if kind == "cluster" and not self._clusters.load(name, cache):
                raise KeyError(callee)

    def _cluster_step(
        self,
        owner: fx.GraphModule,
        cluster: Cluster,
        cache: ArtifactCache,
        result: CompiledRegion,
        options: CompileOptions,
    ) -> Step:
        subgraph = extract_with_outputs(owner, cluster.body, cluster.outputs, "cluster")
        run, report = self._clusters.compile(subgraph, cache)
        use = _merge(result.clusters, report)
        for node in cluster.members:
            if report.origin == "eager":
                leave_engine(node, self.name, report.reason, options.policy)
                result.refused[node.name] = report.reason
            else:
                result.placement[node.name] = f"cluster {report.key[:8]} #{use}"
        names = tuple(node.name for node in subgraph.outputs)
        line = next(filter(None, map(model_line, subgraph.outputs)), "")
        return Step(names, "cluster", f"cluster {run}", refer(subgraph.inputs), {}, line)


def _merge(reports: list[ClusterReport], new: ClusterReport) -> int:
    """Count one more use of a cluster; gives the number of this use, from 1."""
    for report in reports:
        if report.key == new.key:
            report.uses += 1
            return report.uses
    reports.append(new)
    return new.uses
