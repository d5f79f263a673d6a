"""Regions that torch runs in place of the engine, under the fallback policy."""

from torch import fx

from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.ir import callee
from dlinfer.graph.ir.dialect import is_compute, is_size
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.program import Program, Step
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.policy import leave_engine


def eager_region(
    region: Subgraph,
    engine: str,
    options: CompileOptions,
    reason: str,
    name: str = "",
) -> CompiledRegion:
    """Compile the region to steps that run eagerly. Report that the engine refused each node that computes.

    name: the node that caused the refusal; empty if no single node did.
    Raises GraphFallbackError under the policy ``error``.
    """
    refused: dict[str, str] = {}
    for node in sorted(computing(region), key=lambda node: node.name != name):
        refused[node.name] = f"{name}: {reason}" if name and node.name != name else reason
        leave_engine(node, engine, refused[node.name], options.policy)
    return CompiledRegion(eager_program(region), refused=refused)


def eager_program(region: Subgraph) -> Program:
    owner = region.graph_module
    calls = [node for node in owner.graph.nodes if node.op == "call_function"]
    eager = set(computing(region))
    kinds = {node: "eager" if node in eager else "size" if is_size(node) else "view" for node in calls}
    steps = [
        step for node in calls for step in Step.laid_out(node, kinds[node], callee.reference(node.target))
    ]
    return Program.of(owner, steps, callee.resolve)


def computing(region: Subgraph) -> list[fx.Node]:
    """Return the nodes of a region that compute tensors. Views and the arithmetic of sizes are not among them."""
    return [n for n in region.graph_module.graph.nodes if n.op == "call_function" and is_compute(n)]
