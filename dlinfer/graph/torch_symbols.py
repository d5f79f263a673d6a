"""The seam's second half: torch's private parts about symbolic sizes (``torch_seam`` has the others).

``tests/graph/test_torch_symbols.py`` uses each of them on a small case.
"""

from typing import Any

from torch import fx


def number_node(graph: fx.Graph, number: Any, symbols: dict[Any, fx.Node]) -> Any:
    """A symbolic number written as nodes of a graph over the nodes of its symbols."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies: dict[Any, Any] = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    made = sympy_interp(PythonReferenceAnalysis, proxies, number.node.expr)
    return made.node if isinstance(made, fx.Proxy) else made
