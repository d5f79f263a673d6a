"""Write a graph with its weights as an ONNX model for Sophgo's front end, the first part of its compiler.

The front end takes only float32 and integers. So 16-bit floats become float32, which is exact. The option ``quantize``
sets the dtype that the chip computes in. The front end looks for patterns of opset 17, so models of opset 18 are
converted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dlinfer.graph.onnx.export import OnnxGraph
from dlinfer.graph.onnx.weights import fill
from dlinfer.vendor.sophgo.compiler.opset17 import to_opset_17

IR_VERSION = 8
"""The newest IR version of ONNX that the toolchain's onnx package is known to read."""

FILE_BYTES = 1 << 26
"""If a model's weights have this many bytes or more, they are stored in a separate file.

Inside the protobuf message they would be copied three times in memory, and a message may have at most 2 GiB."""


def onnx_bytes_or_file(graph: OnnxGraph, weights: Mapping[str, torch.Tensor], folder: Path) -> bytes | Path:
    """Return the ONNX model with ``weights`` as initialisers: its content or, if it is large, a file in ``folder``.

    weights: input's name -> tensor. Changes ``graph.model``, which then refers to the weights."""
    import onnx_ir

    model = graph.model
    fill(graph, weights)
    _widen(model.graph)
    to_opset_17(graph)
    model.ir_version = IR_VERSION
    if sum(weight.nbytes for weight in weights.values()) < FILE_BYTES:
        return graph.to_bytes()
    path = folder / "model.onnx"
    onnx_ir.save(model, path, external_data="weights.bin")
    return path


def in_one_shape(graph: OnnxGraph, shapes: Mapping[str, Sequence[int]]) -> None:
    """Set the shape of each input that is a key of ``shapes``. Remove symbolic shapes from the results of all nodes."""
    import onnx_ir

    for value in graph.model.graph.inputs:
        if value.name in shapes:
            value.shape = onnx_ir.Shape([int(size) for size in shapes[str(value.name)]])
    for node in graph.model.graph.all_nodes():
        for value in node.outputs:
            value.shape = None if _is_open(value.shape) else value.shape


def _is_open(shape: Any) -> bool:
    return shape is not None and not all(isinstance(size, int) for size in shape)


def _widen(body: Any) -> None:
    """Convert every 16-bit float of a graph to float32: initialisers, constants, casts, and the types of values."""
    nodes = list(body.all_nodes())
    for value in body.initializers.values():
        value.const_value = _float32(value.const_value)
    for node in nodes:
        _widen_node(node)
    results = (value for node in nodes for value in node.outputs)
    for value in [*body.initializers.values(), *body.inputs, *body.outputs, *results]:
        if _is_half(value.dtype):
            value.dtype = type(value.dtype).FLOAT


def _widen_node(node: Any) -> None:
    import onnx_ir

    if node.op_type == "Cast" and _is_half(onnx_ir.DataType(node.attributes["to"].value)):
        node.attributes["to"] = onnx_ir.AttrInt64("to", int(onnx_ir.DataType.FLOAT))
    if node.op_type in ("Constant", "ConstantOfShape") and "value" in node.attributes:
        wide = _float32(node.attributes["value"].value)
        node.attributes["value"] = onnx_ir.AttrTensor("value", wide)


def _float32(tensor: Any) -> Any:
    """Return a constant of 16-bit floats as float32. Return any other constant, or None, unchanged."""
    import onnx_ir

    if tensor is None or not _is_half(tensor.dtype):
        return tensor
    return onnx_ir.tensor(tensor.numpy().astype("float32"), name=tensor.name)


def _is_half(dtype: Any) -> bool:
    return dtype is not None and dtype.name in ("FLOAT16", "BFLOAT16")
