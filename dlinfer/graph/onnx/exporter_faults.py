"""Refuse calls that torch.onnx translates wrongly.

Tests with torch's op database found the wrong translations. Other translations never read some argument, such as
``label_smoothing`` of ``cross_entropy_loss``. A call that passes such an argument is refused if the argument may change
a result.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from dlinfer.graph.ir.dialect import arguments, overload, schema_name
from dlinfer.graph.torch_private.dispatcher import parameters_of
from dlinfer.graph.torch_private.onnx import Registry, UntranslatableError

HARMLESS = frozenset(
    "layout device pin_memory memory_format non_blocking stride implicit path cudnn_enabled cudnn_enable"
    " scale_grad_by_freq sparse sparse_grad requires_grad".split()
)
"""Names of parameters that affect only layout, speed or gradients, in every op."""

HARMLESS_OF: Mapping[str, frozenset[str]] = {
    "aten::embedding": frozenset({"padding_idx"}),  # changes gradients only
    "aten::native_group_norm": frozenset({"C", "HxW"}),  # the input's own sizes
    "aten::repeat_interleave": frozenset({"output_size"}),  # a hint
    # ONNX has no complex tensors: such a call is refused by its dtype.
    "aten::stft": frozenset({"return_complex"}),
}
"""Op -> its parameters that do not change the values of the result."""

_Call = Mapping[str, Any]
"""The arguments of a call by name."""


def _pooling(call: _Call) -> str | None:
    """Return a reason not to export an average pooling, or None.

    ONNX counts elements beyond the padding; torch does not.
    """
    if call["ceil_mode"] and call["count_include_pad"]:
        return "it is an average pooling with ceil_mode and count_include_pad"
    return None


def _padding(call: _Call) -> str | None:
    """Return a reason not to export a padding, or None.

    With a negative size, torch cuts and then pads; ONNX pads first.
    """
    if call["mode"] != "constant" and any(isinstance(size, int) and size < 0 for size in call["pad"]):
        return f"it pads by {call['mode']} with a negative size"
    return None


def _reducing(call: _Call) -> str | None:
    """Return a reason not to export a scatter_reduce, or None.

    ONNX has no mean, and always includes ``self``.
    """
    if call["reduce"] == "mean" or not call["include_self"]:
        return f"ONNX has no scatter_reduce by {call['reduce']} with include_self={call['include_self']}"
    return None


def _crossing(call: _Call) -> str | None:
    """Return a reason not to export a cross product, or None.

    Without ``dim``, torch uses the first dimension of size 3, and the translation uses the last dimension.
    """
    return "it is a cross product without dim" if call["dim"] is None else None


# The translation of an embedding bag is a loop that reads at unchecked offsets: ONNX Runtime dies with SIGSEGV.
_BAGS = ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
_FAULTS: Mapping[str, str | Callable[[_Call], str | None]] = {
    **{f"aten::{name}": "its translation reads at unchecked offsets" for name in _BAGS},
    **{f"aten::avg_pool{dims}d": _pooling for dims in (1, 2, 3)},
    "aten::cross": _crossing,
    "aten::as_strided": "it reads memory by strides, which ONNX does not have",  # ONNX values have none
    "aten::pad": _padding,
    "aten::scatter_reduce": _reducing,
    "aten::special_log_ndtr": "its translation overflows",
    "aten::special_erfcx": "its translation overflows",
}
"""Schema name of an op -> a reason not to use torch.onnx's translation, or a function from a call to the reason."""


def refuse_faults(graph: fx.Graph, registry: Registry) -> None:
    """Raise UntranslatableError for a call of a graph that torch.onnx translates wrongly."""
    for node in graph.nodes:
        if node.op == "call_function" and (reason := _fault(node, registry)) is not None:
            raise UntranslatableError(node.name, reason)


def _fault(node: fx.Node, registry: Registry) -> str | None:
    op = overload(node)
    if op is None or op in registry.ours:
        return None
    call, name = arguments(node), schema_name(node)
    fault = _FAULTS.get(name)
    if fault is not None and (reason := fault if isinstance(fault, str) else fault(call)) is not None:
        return reason
    unread = registry.unread(op) - HARMLESS - HARMLESS_OF.get(name, frozenset())
    for parameter in parameters_of(op):
        if parameter.name not in unread:
            continue
        if not parameter.has_default_value() or call[parameter.name] != parameter.default_value:
            return f"torch.onnx's translation ignores {parameter.name}={call.get(parameter.name)}"
    return None
