"""The fallback policy for graphs: what happens to a node that its engine does not run."""

import warnings

from torch import fx

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.dialect import describe, fake, model_line, op_name
from dlinfer.ops.fallback import FallbackWarning

_warned: set[tuple[str, str]] = set()


def leave_engine(node: fx.Node, engine: str, reason: str, policy: str) -> None:
    """Let a node run outside ``engine``: silently, with a warning once for each reason, or not at all.

    Raises GraphFallbackError under the policy ``error``.
    """
    if policy == "error":
        raise GraphFallbackError(
            node=node.name,
            op=op_name(node),
            call=", ".join(describe(fake(parent)) for parent in node.all_input_nodes),
            line=model_line(node) or "an unknown line",
            engine=engine,
            reason=reason,
        )
    if policy == "warn" and (op_name(node), reason) not in _warned:
        _warned.add((op_name(node), reason))
        text = (
            f"{op_name(node)} runs outside graph engine {engine!r}: {reason} (from {model_line(node)}). "
            "Said once; dlinfer.explain shows all."
        )
        warnings.warn(text, FallbackWarning, stacklevel=2)
