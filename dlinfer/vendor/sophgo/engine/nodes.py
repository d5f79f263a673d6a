"""Which nodes go to Sophgo's compiler: those that it takes and computes right, as the tests of this table show."""

from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake, is_size, is_view, overload, tensors_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

OPS = frozenset(
    """
    Abs Add AveragePool Cast Concat Constant Conv Div Equal Erf Exp Expand Flatten Gather Gemm Identity
    LayerNormalization MatMul Max MaxPool Min Mul Neg Pad Pow Reciprocal ReduceMean ReduceSum Relu Reshape Shape
    Sigmoid Slice Softmax Split Sqrt Squeeze Sub Tanh Transpose Unsqueeze Where
    """.split()
)
"""ONNX ops that were run on the emulator against torch (tests/vendor/sophgo/test_engine_ops.py)."""

_LOOKUPS = {"aten::embedding": 1, "aten::index_select": 2}
"""Ops that look rows up by whole numbers -> which argument these are. Rows are counted from 0 on, and each call is
checked, since the chip reads whatever lies there."""


def fault(model: bytes) -> str | None:
    """Return what is against a node's model: an ONNX op that has not been tried on the chip."""
    import onnx

    loaded = onnx.ModelProto.FromString(model)
    unknown = ", ".join(sorted({node.op_type for node in loaded.graph.node} - OPS))
    return f"ONNX op {unknown} has not been tried with Sophgo's compiler" if unknown else None


def lookups(graph_module: fx.GraphModule) -> list[tuple[str, Any]]:
    """(name of the input that is looked up by, rows there are) of a region's graph; rows may be a symbolic size."""
    found = []
    for node in graph_module.graph.nodes:
        place = _index_argument(node)
        if place is not None:
            source: Any = node.args[0]
            dim = int(node.args[1]) if _name(node) == "aten::index_select" else 0
            found.append((node.args[place].name, fake(source).shape[dim]))
    return found


def wrong_numbers(node: fx.Node) -> str | None:
    """Why the dtypes of a node's tensors are none that the chip computes with."""
    for result in tensors_of(node):
        if result.dtype not in FLOATS:
            return f"it gives {_dtype(result)}, and the chip computes with floats"
    place = _index_argument(node)
    for index, parent in enumerate(node.args):
        if not isinstance(parent, fx.Node):
            continue
        for tensor in tensors_of(parent):
            if tensor.dtype in FLOATS:
                continue
            if index != place:
                return f"it takes {_dtype(tensor)}, and the chip computes with floats"
            if parent.op == "get_attr" or tensor.dtype not in (torch.int64, torch.int32):
                return f"it looks up by {_dtype(tensor)} of the graph's own"
    if is_size(node) or is_view(node):
        return None
    others = [one for one in node.all_input_nodes if one not in node.args]
    if any(tensor.dtype not in FLOATS for one in others for tensor in tensors_of(one)):
        return "it takes tensors that are not of floats"
    return None


def _index_argument(node: fx.Node) -> int | None:
    return _LOOKUPS.get(_name(node)) if node.op == "call_function" else None


def _name(node: fx.Node) -> str:
    op = overload(node)
    return op._schema.name if op is not None else ""


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
