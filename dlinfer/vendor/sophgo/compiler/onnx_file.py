"""A graph with its weights as the ONNX file that Sophgo's front end reads.

The front end knows float32 and whole numbers; which floats the chip computes in is said when it compiles. So 16-bit
floats of the graph are written as float32, which holds each of them exactly. It looks for patterns as opset 17 writes
them: models come as 18, whose reductions take their axes as an input.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlinfer.errors import NotExportableError
from dlinfer.graph.onnx.export import OnnxGraph
from dlinfer.graph.onnx.weights import fill

OPSET = 17
IR_VERSION = 8
"""The newest that the toolchain's onnx package certainly reads."""

FILE_BYTES = 1 << 26
"""Weights from this size on stand in a file of their own: in a message they would be in memory three times more, and
protobuf takes 2 GiB in one."""


def onnx_bytes_or_file(graph: OnnxGraph, weights: Mapping[str, torch.Tensor], folder: Path) -> bytes | Path:
    """The model with ``weights`` (name of an input -> tensor) as initialisers; in ``folder`` if it is large.

    Changes ``graph.model``, which keeps references to the weights.
    """
    import onnx_ir

    model = graph.model
    hold(graph, weights)
    in_opset_17(graph)
    model.ir_version = IR_VERSION
    if sum(weight.nbytes for weight in weights.values()) < FILE_BYTES:
        return graph.to_bytes()
    path = folder / "model.onnx"
    onnx_ir.save(model, path, external_data="weights.bin")
    return path


def hold(graph: OnnxGraph, weights: Mapping[str, torch.Tensor]) -> None:
    """Make inputs of the model initialisers, and every 16-bit float a float32."""
    fill(graph, weights)
    body = graph.model.graph
    for value in body.initializers.values():
        _widen_constant(value)
    for value in [*body.inputs, *body.outputs]:
        _widen_type(value)
    for node in graph.model.graph.all_nodes():
        _widen_node(node)
        for value in node.outputs:
            _widen_type(value)


def in_one_shape(graph: OnnxGraph, shapes: Mapping[str, Sequence[int]]) -> None:
    """Give inputs fixed sizes, and forget what the model said of sizes that follow from them."""
    import onnx_ir

    for value in graph.model.graph.inputs:
        if value.name in shapes:
            value.shape = onnx_ir.Shape([int(size) for size in shapes[value.name]])
    for node in graph.model.graph.all_nodes():
        for value in node.outputs:
            value.shape = None if _is_open(value.shape) else value.shape


def _is_open(shape: Any) -> bool:
    return shape is not None and not all(isinstance(size, int) for size in shape)


def _is_half(dtype: Any) -> bool:
    return dtype is not None and dtype.name in ("FLOAT16", "BFLOAT16")


def _widen_type(value: Any) -> None:
    if _is_half(value.dtype):
        value.dtype = type(value.dtype).FLOAT


def _widen_constant(value: Any) -> None:
    held = value.const_value
    if held is not None and _is_half(held.dtype):
        value.const_value = _float32(held)
    _widen_type(value)


def _float32(tensor: Any) -> Any:
    import onnx_ir

    return onnx_ir.tensor(tensor.numpy().astype("float32"), name=tensor.name)


def _widen_node(node: Any) -> None:
    """Casts to 16 bits become casts to float32, and constants of 16 bits constants of float32."""
    import onnx_ir

    if node.op_type == "Cast":
        to = onnx_ir.DataType(node.attributes["to"].value)
        if _is_half(to):
            node.attributes["to"] = onnx_ir.AttrInt64("to", int(onnx_ir.DataType.FLOAT))
    if node.op_type in ("Constant", "ConstantOfShape") and "value" in node.attributes:
        tensor = node.attributes["value"].value
        if _is_half(tensor.dtype):
            node.attributes["value"] = onnx_ir.AttrTensor("value", _float32(tensor))


_REDUCTIONS = frozenset(
    f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare".split()
)


def in_opset_17(graph: OnnxGraph) -> None:
    """Write what opset 18 says otherwise as 17 does. Raises NotExportableError for what 17 cannot say."""
    for node in list(graph.model.graph):
        if node.op_type == "Constant":
            _as_initialiser(graph, node)
    for node in list(graph.model.graph.all_nodes()):
        if node.op_type in _REDUCTIONS and len(node.inputs) > 1:
            _axes_as_attribute(node)
        elif node.op_type == "Split" and "num_outputs" in node.attributes:
            _sizes_as_input(graph, node)
    graph.model.opset_imports[""] = OPSET


def _as_initialiser(graph: OnnxGraph, node: Any) -> None:
    """A constant in the one form that the front end reads everywhere."""
    (value,) = node.outputs
    held = initialiser(graph, value.name, _content(node))
    value.replace_all_uses_with(held, replace_graph_outputs=True)
    graph.model.graph.remove(node, safe=True)


def initialiser(graph: OnnxGraph, name: str, content: np.ndarray) -> Any:
    """A new initialiser of the model."""
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
        raise NotExportableError(node=node.name or "", op=node.op_type, reason="axes that are no constants")
    node.attributes["axes"] = onnx_ir.AttrInt64s("axes", [int(axis) for axis in axes.reshape(-1)])
    node.attributes.pop("noop_with_empty_axes", None)
    node.resize_inputs(1)


def _constant(value: Any) -> Any:
    """The content of a list of numbers, flat as numpy; None where only a run tells."""
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is not None and node.op_type in ("Reshape", "Identity"):  # as torch.onnx writes a list of axes
        before = _constant(node.inputs[0])
        return None if before is None else before.reshape(-1)
    return _content(node) if node is not None and node.op_type == "Constant" else None


def _content(node: Any) -> np.ndarray:
    """What a Constant holds."""
    (attribute,) = node.attributes.values()
    held = attribute.value
    if hasattr(held, "numpy"):
        return held.numpy()
    return np.asarray(held, np.float32 if "float" in attribute.name else np.int64)


def _sizes_as_input(graph: OnnxGraph, node: Any) -> None:
    """The sizes of equal parts; the last one is smaller where they do not fill the dimension."""
    count = node.attributes.pop("num_outputs").value
    axis = node.attributes["axis"].value if "axis" in node.attributes else 0
    shape = node.inputs[0].shape
    whole = shape[axis] if shape is not None else None
    if not isinstance(whole, int):
        raise NotExportableError(node=node.name or "", op="Split", reason="a dimension of unknown size")
    part = -(-whole // count)
    sizes = [part] * (count - 1) + [whole - part * (count - 1)]
    value = initialiser(graph, f"{node.outputs[0].name}_sizes", np.asarray(sizes, np.int64))
    node.resize_inputs(2)
    node.replace_input_with(1, value)
