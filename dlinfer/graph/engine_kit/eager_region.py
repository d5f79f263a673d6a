"""Torch runs a region, or one call of it, in place of the engine, under the fallback policy."""

from collections.abc import Mapping

from torch import fx

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.ir import callee
from dlinfer.graph.ir.dialect import STATIC, describe, fake, is_compute, is_size, model_line
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.program import Program, Step
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.policy import leave_engine
from dlinfer.ops.core.fallback import Fallback, settle


def eager_region(
    region: Subgraph,
    engine: str,
    options: CompileOptions,
    reason: str,
    reasons: Mapping[str, str] | None = None,
) -> CompiledRegion:
    """Compile the region to eager steps, and report each node that computes as refused.

    reasons: node name -> its own reason, where it is not ``reason``. Raises GraphFallbackError under the policy
    ``error``, for a node with its own reason first.
    """
    own = reasons or {}
    refused: dict[str, str] = {}
    for node in sorted(_computing(region), key=lambda node: node.name not in own):
        refused[node.name] = own.get(node.name, reason)
        leave_engine(node, engine, refused[node.name], options.policy)
    return CompiledRegion(eager_program(region), refused=refused)


def eager_program(region: Subgraph) -> Program:
    """A program that runs the region with torch's kernels."""
    owner = region.graph_module
    calls = [node for node in owner.graph.nodes if node.op == "call_function"]
    computing = set(_computing(region))
    kinds = {node: "eager" if node in computing else "size" if is_size(node) else "view" for node in calls}
    steps = [
        step for node in calls for step in Step.laid_out(node, kinds[node], callee.reference(node.target))
    ]
    return Program.of(owner, steps, callee.resolve)


def leave_for_a_call(region: Subgraph, engine: str, reason: str, policy: str) -> None:
    """Count one call of a compiled region that torch runs; the policy ``warn`` warns once for each reason.

    reason: why the compiled region is wrong for these inputs. Raises GraphFallbackError under the policy ``error``.
    """
    name = region.name

    def refusal() -> GraphFallbackError:
        inputs = region.graph_module.graph.find_nodes(op="placeholder")
        first = next(iter(_computing(region)), None)
        return GraphFallbackError(
            node=name,
            op="a region",
            call=", ".join(describe(fake(node)) for node in inputs if not node.meta.get(STATIC)),
            line=(model_line(first) if first is not None else "") or "an unknown line",
            engine=engine,
            reason=reason,
        )

    def text() -> str:
        return f"{name} runs outside graph engine {engine!r} at a call: {reason}. Said once; each is counted."

    settle(Fallback(name, engine, reason), policy, refusal, text)


def _computing(region: Subgraph) -> list[fx.Node]:
    return [n for n in region.graph_module.graph.nodes if n.op == "call_function" and is_compute(n)]
