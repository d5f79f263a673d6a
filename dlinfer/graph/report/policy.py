"""The fallback policy for nodes outside the engine, and for functions that could not be captured."""

from torch import fx

from dlinfer.errors import DlinferError, GraphFallbackError
from dlinfer.graph.ir.dialect import describe, fake, model_line, op_name
from dlinfer.ops.core.fallback import Fallback, settle


def leave_engine(node: fx.Node, engine: str, reason: str, policy: str) -> None:
    """Count a node that runs outside ``engine``. Under the policy ``warn``, warn once for each reason.

    Raises GraphFallbackError under the policy ``error``.
    """
    op, line = op_name(node), model_line(node)

    def refusal() -> GraphFallbackError:
        call = ", ".join(describe(fake(parent)) for parent in node.all_input_nodes)
        return GraphFallbackError(
            engine=engine, reason=reason, node=node.name, op=op, call=call, line=line or "an unknown line"
        )

    text = (
        f"{op} runs outside graph engine {engine!r}: {reason} (from {line}). This warning appears once; "
        "dlinfer.explain lists all such nodes."
    )
    settle(Fallback(op, engine, reason), policy, refusal, lambda: text)


def leave_graph(what: str, error: DlinferError, policy: str) -> None:
    """Count a function that runs eagerly because of ``error``. Under the policy ``warn``, warn once for each reason.

    what: the name that the function is counted under. Raises ``error`` under the policy ``error``.
    """
    settle(
        Fallback(what, "capture", str(error)),
        policy,
        lambda: error,
        lambda: f"{error} The function runs eagerly.",
    )
