"""The graph engine ``inductor`` for CPU: it calls kernels directly, and torch's inductor compiles the ops between them.

A region (the part of a model's graph that one engine runs) becomes a program of steps. Library calls, dlinfer's
attention and cache ops, writes and random draws are steps of their own, in the model's order. A write changes the cache
itself, so no cache is cloned. The pointwise ops and reductions between two such steps form one cluster, which inductor
compiles to loops. Weights are inputs: they are neither copied nor frozen, and an artifact on disk holds none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import fx

from dlinfer.graph.cache.disk import ArtifactCache, MissingEntryError
from dlinfer.graph.engine import CompiledRegion, Engine
from dlinfer.graph.ir.callee import COUNT_WRITES
from dlinfer.graph.ir.dialect import is_compute, is_size, model_line, storages, tensors_of, written_arguments
from dlinfer.graph.ir.extract import Subgraph, extract
from dlinfer.graph.ir.layout import is_contiguous
from dlinfer.graph.ir.program import Function, Program, Step, refer
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.report.policy import leave_engine
from dlinfer.graph.report.report import ClusterReport
from dlinfer.graph.torch_private import dispatcher
from dlinfer.settings import cache_folder
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor import gated_linear, kernels
from dlinfer.vendor.cpu.inductor.chains import join
from dlinfer.vendor.cpu.inductor.clusters import ClusterCompiler, code_generator
from dlinfer.vendor.cpu.inductor.escaping import in_own_memory
from dlinfer.vendor.cpu.inductor.gated_sum import CALLEE, gated_sum_of
from dlinfer.vendor.cpu.inductor.kernel_refusal import kernel_refusal
from dlinfer.vendor.cpu.inductor.masks import SHARED_MASKS
from dlinfer.vendor.cpu.inductor.schedule import Cluster, schedule
from dlinfer.vendor.cpu.inductor.selftest import CLUSTERS, EVERY_DTYPE, selftest


@dataclass
class _Notes:
    """Notes from compiling a region, for the fields of CompiledRegion that have the same names."""

    placement: dict[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    clusters: list[ClusterReport] = field(default_factory=list[ClusterReport])


class InductorEngine(Engine):
    """The engine ``inductor``: runs graphs on CPU, with torch's own code generator for loops."""

    name = "inductor"
    passes: Sequence[Pass] = (SHARED_MASKS,)
    concurrent = True  # programs, clusters and kernels keep nothing between calls

    def __init__(self) -> None:
        self._clusters = ClusterCompiler()
        self.selftest = self._selftest = selftest()

    def refuses(self, node: fx.Node) -> str | None:
        """Return a reason to refuse a node: it is a higher-order op, or it uses another device; else None."""
        if node.op == "call_function" and isinstance(node.target, dispatcher.HigherOrderOperator):
            return f"{node.target} is a higher-order op"
        for reader in (node, *node.all_input_nodes):
            for tensor in tensors_of(reader):
                if tensor.device.type != "cpu":
                    return f"it uses a tensor on device {tensor.device.type!r}"
        return None

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        owner = region.graph_module
        result = _Notes()
        folder = options.cache_dir or cache_folder()
        cache = ArtifactCache(folder, "inductor")
        native.load(folder / "native")  # before the clusters, which use its memory
        # Compiling one elementary loop gains nothing: ATen's kernel for it is as good.
        smallest = 1 if options.keeps_small_regions else 2
        first: list[Step] = []
        steps: list[Step] = []
        uncounted: set[int] = set()  # written by kernels below torch's dispatcher
        for item in schedule(owner.graph, smallest=smallest):
            if isinstance(item, Cluster) and (known := self._known_cluster(item, folder)) is not None:
                steps.append(known)
                result.placement |= dict.fromkeys(
                    (node.name for node in item.members), f"kernel {known.callee}"
                )
            elif isinstance(item, Cluster):
                subgraph = extract(owner, item.body, "cluster", item.outputs)
                first += [Step.of(node, "size", kernels.callee_of(node)) for node in subgraph.inserted]
                steps.append(self._cluster_step(item, subgraph, cache, result, options))
            else:
                kind = "size" if is_size(item) else "kernel" if is_compute(item) else "view"
                reference = self._kernel(item, folder, result, options)
                if not reference.startswith("op "):
                    uncounted |= {memory for target in written_arguments(item) for memory in storages(target)}
                calls = _call(item, kind, reference)
                layer = gated_linear.linear_of(item, reference, steps) if len(calls) == 1 else None
                both = "" if layer is None else gated_linear.CALLEES[layer.callee]
                if layer is not None and self._fault_of_native(item, both, folder) is None:
                    reference = both
                    result.placement[str(layer.results)] = f"kernel {reference}"
                    calls = [replace(steps.pop(), results=item.name, callee=reference)]
                steps += calls
                if kind == "kernel" and item.name not in result.refused:
                    result.placement[item.name] = f"kernel {reference}"
        placeholders = owner.graph.find_nodes(op="placeholder")
        written = [node for node in placeholders if not uncounted.isdisjoint(storages(node))]
        if written:
            first.insert(0, Step((), "size", COUNT_WRITES, (refer(written),), {}, ""))
        steps = first + in_own_memory(owner.graph, steps)
        program = Program.of(owner, steps, self.resolve, self.join)
        return CompiledRegion(program, result.placement, result.refused, result.clusters)

    def _kernel(self, node: fx.Node, folder: Path, result: _Notes, options: CompileOptions) -> str:
        """Return the callee for a node: its C++ kernel or, if that cannot be used, the vendor's or torch's kernel.

        A C++ kernel cannot be used if it cannot be built or fails its self-test. If the vendor's kernel refuses the
        call, dlinfer's reference implementation of the op runs. Both replacements are reported, and the fallback policy
        may forbid them."""
        reference = kernels.callee_of(node)
        reason = None
        if reference.startswith("native "):
            reason = self._fault_of_native(node, reference, folder)
            if reason is not None:
                reference = kernels.callee_of(node, native=False)
        if reason is None and reference.startswith("vendor "):
            reason = kernel_refusal(node)
        if reason is not None:
            leave_engine(node, self.name, reason, options.policy)
            result.refused[node.name] = reason
        return reference

    def _fault_of_native(self, node: fx.Node, reference: str, folder: Path) -> str | None:
        """Return a reason not to use a node's C++ kernel here; None if it may be used.

        reference: the kernel's name, as ``kernels.callee_of`` returns it. folder: dlinfer's cache.
        """
        missing = native.why_not(folder / "native")
        if missing is not None:
            return f"the C++ kernels cannot be built: {missing}"
        return self._selftest.failure(reference, kernels.precision_of_call(node))

    def _known_cluster(self, cluster: Cluster, folder: Path) -> Step | None:
        """Return a step that computes a whole cluster with one C++ kernel; None if no usable kernel does."""
        operands = gated_sum_of(cluster)
        (total,) = cluster.outputs if operands is not None else (None,)
        if operands is None or total is None or self._fault_of_native(total, CALLEE, folder) is not None:
            return None
        return Step(total.name, "kernel", CALLEE, refer(operands), {}, model_line(total))

    def identity(self, cache_dir: Path) -> Mapping[str, object]:
        """Return this engine's part of a cache key: whether it can use C++ kernels, and its code generator."""
        return {"native_kernels": native.why_not(cache_dir / "native") is None} | code_generator()

    def join(
        self, steps: Sequence[Step], outputs: Iterable[str]
    ) -> tuple[Sequence[Step], Mapping[str, Function]]:
        """Join runs of steps into chains. One C++ call runs a chain."""
        return join(steps, outputs)

    def resolve(self, callee: str) -> Function:
        """Return the function that a callee in this engine's programs stands for."""
        kind, _, name = callee.partition(" ")
        return self._clusters.run(name) if kind == "cluster" else kernels.resolve(callee)

    def restore(self, callees: Collection[str], cache_dir: Path) -> None:
        """Load the clusters among ``callees`` from the disk cache. Raises MissingEntryError if one is missing."""
        cache = ArtifactCache(cache_dir, "inductor")
        native.load(cache_dir / "native")
        for callee in callees:
            kind, _, name = callee.partition(" ")
            if kind == "cluster" and not self._clusters.load(name, cache):
                raise MissingEntryError(callee)

    def keeps(self, callees: Collection[str]) -> bool:
        """Return whether ``restore`` can load these callees in a process without a compiler."""
        kinds = (callee.partition(" ") for callee in callees)
        return all(self._clusters.keeps(name) for kind, _, name in kinds if kind == "cluster")

    def _cluster_step(
        self,
        cluster: Cluster,
        subgraph: Subgraph,
        cache: ArtifactCache,
        result: _Notes,
        options: CompileOptions,
    ) -> Step:
        run, report = self._clusters.compile(subgraph, cache, self._selftest.failure(CLUSTERS, EVERY_DTYPE))
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


def _call(node: fx.Node, kind: str, reference: str) -> list[Step]:
    """Return one or two steps: a call of a node's kernel and, if needed, a step that restores the fakes' strides.

    Later steps rely on these strides. Only C++ kernels, except attention, are sure to return contiguous tensors.
    kind, reference: the kind and the callee of the first step."""
    packed = reference.startswith("native ") and reference != "native scaled_dot_product_attention"
    own = packed and all(map(is_contiguous, tensors_of(node)))
    return [Step.of(node, kind, reference)] if own else Step.laid_out(node, kind, reference)


def _merge(reports: list[ClusterReport], new: ClusterReport) -> int:
    """Add one use of a cluster to the reports. Return how often the region uses this cluster so far."""
    for report in reports:
        if report.key == new.key:
            report.uses += 1
            return report.uses
    reports.append(new)
    return new.uses
