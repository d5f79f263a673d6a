"""Convert a model from opset 18 to opset 17, for compilers that read only opset 17 or look for its patterns.

Two differences matter here: in opset 18, reductions take their axes as an input, and Split can take a number of
parts."""

from typing import Any

import numpy as np

from dlinfer.errors import NotExportableError
from dlinfer.graph.onnx.export import OnnxGraph

_REDUCTIONS = frozenset(
    f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare".split()
)


def to_opset_17(graph: OnnxGraph) -> None:
    """Convert a model of opset 18 in place. Raises NotExportableError for a node that opset 17 cannot express."""
    for node in list(graph.model.graph):
        if node.op_type == "Constant":
            _as_initialiser(graph, node)
    for node in list(graph.model.graph.all_nodes()):
        if node.op_type in _REDUCTIONS and len(node.inputs) > 1:
            _axes_as_attribute(node)
        elif node.op_type == "Split" and "num_outputs" in node.attributes:
            _sizes_as_input(graph, node)
    graph.model.opset_imports[""] = 17


def _as_initialiser(graph: OnnxGraph, node: Any) -> None:
    """Replace a Constant node by an initialiser. In some places the front end reads only initialisers."""
    (value,) = node.outputs
    held = initialiser(graph, value.name, _content(node))
    value.replace_all_uses_with(held, replace_graph_outputs=True)
    graph.model.graph.remove(node, safe=True)


def initialiser(graph: OnnxGraph, name: str, content: np.ndarray) -> Any:
    import onnx_ir

    tensor: Any = onnx_ir.tensor(content, name=name)
    value = onnx_ir.Value(
        name=name, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.model.graph.initializers[name] = value
    return value


def _axes_as_attribute(node: Any) -> None:
    import onnx_ir

    axes = _constant(node.inputs[1])
    if axes is None:
        raise NotExportableError(node=node.name or "", op=node.op_type, reason="the axes are not constants")
    node.attributes["axes"] = onnx_ir.AttrInt64s("axes", [int(axis) for axis in axes.reshape(-1)])
    node.attributes.pop("noop_with_empty_axes", None)
    node.resize_inputs(1)


def _constant(value: Any) -> Any:
    """Return a constant list of numbers as a flat numpy array; None if ``value`` is not a constant."""
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is not None and node.op_type in (
        "Reshape",
        "Identity",
    ):  # torch.onnx writes lists of axes like this
        before = _constant(node.inputs[0])
        return None if before is None else before.reshape(-1)
    return _content(node) if node is not None and node.op_type == "Constant" else None


def _content(node: Any) -> np.ndarray:
    (attribute,) = node.attributes.values()
    held = attribute.value
    if hasattr(held, "numpy"):
        return held.numpy()
    return np.asarray(held, np.float32 if "float" in attribute.name else np.int64)


def _sizes_as_input(graph: OnnxGraph, node: Any) -> None:
    """Replace Split's number of parts by the sizes of the parts. They are equal, but the last may be smaller."""
    count = node.attributes.pop("num_outputs").value
    axis = node.attributes["axis"].value if "axis" in node.attributes else 0
    shape = node.inputs[0].shape
    whole = shape[axis] if shape is not None else None
    if not isinstance(whole, int):
        raise NotExportableError(node=node.name or "", op="Split", reason="a dimension has an unknown size")
    part = -(-whole // count)
    sizes = [part] * (count - 1) + [whole - part * (count - 1)]
    value = initialiser(graph, f"{node.outputs[0].name}_sizes", np.asarray(sizes, np.int64))
    node.resize_inputs(2)
    node.replace_input_with(1, value)
