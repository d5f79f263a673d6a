"""Whether a node has a place in an ONNX model, asked before a graph is divided.

What a certain runtime lacks beyond the standard is its engine's to know.
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer.errors import NotExportableError
from dlinfer.graph.dialect import fake, gives_something
from dlinfer.graph.onnx.export import OPSET, Table, export

_known: dict[Any, str | None] = {}


def refusal(
    node: fx.Node, *, opset: int = OPSET, translations: Callable[[], Table] | None = None
) -> str | None:
    """Why ``export`` would not take a node, or not make valid ONNX of it; None when it would.

    The node is exported alone, once for each way it is called: the op, its fixed arguments, and the dtypes and sizes
    of its inputs.
    """
    if node.op != "call_function":
        return None
    if node.target is getitem:  # one result of a node, which stays with it
        return refusal(node.all_input_nodes[0], opset=opset, translations=translations)
    key = (node.target, opset, translations, _text((node.args, dict(node.kwargs))))
    if key not in _known:
        _known[key] = _tried(node, opset, translations)
    return _known[key]


def _text(arguments: Any) -> str:
    return str(map_arg(arguments, lambda node: f"<{_described(fake(node))}>"))


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {[str(size) for size in value.shape]}"
    if isinstance(value, (tuple, list)):
        return str([_described(item) for item in value])
    return type(value).__name__


def _tried(node: fx.Node, opset: int, translations: Callable[[], Table] | None) -> str | None:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for parent in node.all_input_nodes:
        copies[parent] = graph.placeholder(parent.name)
        copies[parent].meta = {"val": fake(parent)}
    copy = graph.node_copy(node, copies.__getitem__)
    value = fake(node)
    results = list(value) if isinstance(value, (tuple, list)) else None
    if results is not None:
        parts = [graph.call_function(getitem, (copy, index)) for index in range(len(results))]
        for part, one in zip(parts, results, strict=True):
            part.meta = {"val": one}
        graph.output(tuple(part for part in parts if isinstance(part.meta["val"], torch.Tensor)))
    else:
        graph.output((copy,) if gives_something(node) else ())  # an assertion is left out of the model
    try:
        model = export(fx.GraphModule(torch.nn.Module(), graph), opset=opset, translations=translations)
    except NotExportableError as error:
        return str(error.fields["reason"])
    return _fault(model.to_bytes())


def _fault(model: bytes) -> str | None:
    """What ONNX's own checker has against a model: a type that an op of the standard does not take."""
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return f"its translation is no valid ONNX: {' '.join(str(error).split())[:300]}"
    return None
