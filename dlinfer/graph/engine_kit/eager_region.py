"""A region that its engine does not run, at all or at one call: torch's kernels one by one, under the policy."""

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
    """The region as a program of eager steps, each node that computes refused with its reason.

    reason: of the region. reasons: node name -> one of its own. Raises GraphFallbackError under the policy ``error``,
    for a node with a reason of its own before others.
    """
    own = reasons or {}
    refused: dict[str, str] = {}
    for node in sorted(_computing(region), key=lambda node: node.name not in own):
        refused[node.name] = own.get(node.name, reason)
        leave_engine(node, engine, refused[node.name], options.policy)
    return CompiledRegion(eager_program(region), refused=refused)


def eager_program(region: Subgraph) -> Program:
    """The region as a program that calls torch's kernels."""
    owner = region.graph_module
    calls = [node for node in owner.graph.nodes if node.op == "call_function"]
    computing = set(_computing(region))
    kinds = {node: "eager" if node in computing else "size" if is_size(node) else "view" for node in calls}
    steps = [
        step for node in calls for step in Step.laid_out(node, kinds[node], callee.reference(node.target))
    ]
    return Program.of(owner, steps, callee.resolve)


def leave_for_a_call(region: Subgraph, engine: str, reason: str, policy: str) -> None:
    """Let one call of a compiled region run eagerly: counted, under ``warn`` said once for each reason.

    reason: why what was compiled is not right for the call's inputs. Raises GraphFallbackError under ``error``.
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
