"""Arguments that the exporter's translations never read, such as ``label_smoothing`` of ``cross_entropy_loss``.

A call that passes one is refused, unless the argument does not change the values of a result.
"""

from collections.abc import Mapping

from torch import fx

from dlinfer.graph.ir.dialect import arguments, overload
from dlinfer.graph.torch_private.onnx import Registry, UntranslatableError

HARMLESS = frozenset(
    "layout device pin_memory memory_format non_blocking stride implicit path cudnn_enabled cudnn_enable"
    " scale_grad_by_freq sparse sparse_grad requires_grad".split()
)
"""Parameters of any op that affect layout, speed or gradients only."""

HARMLESS_OF: Mapping[str, frozenset[str]] = {
    "aten::embedding": frozenset({"padding_idx"}),  # of the gradient
    "aten::native_group_norm": frozenset({"C", "HxW"}),  # the input's own sizes
    "aten::repeat_interleave": frozenset({"output_size"}),  # a hint
    "aten::stft": frozenset(
        {"return_complex"}
    ),  # ONNX has no complex tensors: such a call is refused by its dtype
}
"""Parameters of one op that do not change the values of its result."""


def refuse_unread(graph: fx.Graph, registry: Registry) -> None:
    """Raise UntranslatableError for a call of a graph with an argument that its translation ignores."""
    for node in graph.nodes:
        if node.op == "call_function" and (reason := unread_argument(node, registry)) is not None:
            raise UntranslatableError(node.name, reason)


def unread_argument(node: fx.Node, registry: Registry) -> str | None:
    """Why a call is refused: its translation ignores an argument. None where it is not refused."""
    op = overload(node)
    unread = registry.unread(op) if op is not None else frozenset()
    if op is None or not unread:
        return None
    given = arguments(node)
    for parameter in op._schema.arguments:
        name = parameter.name
        if name not in unread or name in HARMLESS | HARMLESS_OF.get(op._schema.name, frozenset()):
            continue
        if not parameter.has_default_value() or given[name] != parameter.default_value:
            return f"torch.onnx's translation ignores {name}={given.get(name)}"
    return None
