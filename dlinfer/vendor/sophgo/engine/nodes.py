"""Choose the nodes for Sophgo's compiler: those whose ONNX ops are tested and whose dtypes the chip supports."""

from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake, is_size, is_view, overload, tensors_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

OPS = frozenset(
    [
        *"Abs Add AveragePool Cast Concat Constant Conv Div Equal Erf Exp Expand Flatten Gather Gemm".split(),
        *"Identity LayerNormalization MatMul Max MaxPool Min Mul Neg Pad Pow Reciprocal ReduceMean".split(),
        *"ReduceSum Relu Reshape Shape Sigmoid Slice Softmax Split Sqrt Squeeze Sub Tanh Transpose".split(),
        *("Unsqueeze", "Where"),
    ]
)
"""ONNX ops whose results on the emulator were compared with torch's (tests/vendor/sophgo/test_engine_ops.py)."""

_LOOKUPS = {"aten::embedding": 1, "aten::index_select": 2}
"""Name of an op that looks up rows by index -> position of the indices among its arguments.

The chip does not check that indices are in range, so the engine checks them at each call."""


def fault(model: bytes) -> str | None:
    """Return a reason to refuse a node if its ONNX form has ops that were not tested with the compiler; else None.

    model: the node's ONNX form."""
    import onnx

    loaded = onnx.ModelProto.FromString(model)
    unknown = ", ".join(sorted({node.op_type for node in loaded.graph.node} - OPS))
    return f"ONNX op {unknown} was not tested with Sophgo's compiler" if unknown else None


def lookups(graph_module: fx.GraphModule) -> list[tuple[str, Any]]:
    """Return a pair for each lookup: the name of the input that has indices, and the number of rows of the table.

    The number of rows may be symbolic."""
    tables = []
    for node in graph_module.graph.nodes:
        place = _index_argument(node)
        if place is not None:
            source: Any = node.args[0]
            dim = int(node.args[1]) if _name(node) == "aten::index_select" else 0
            tables.append((node.args[place].name, fake(source).shape[dim]))
    return tables


def wrong_numbers(node: fx.Node) -> str | None:
    """Return a reason to refuse a node if the chip cannot compute with the dtypes of its tensors; else None."""
    for result in tensors_of(node):
        if result.dtype not in FLOATS:
            return f"its result is {_dtype(result)}, but the chip computes with floats"
    place = _index_argument(node)
    for index, parent in enumerate(node.args):
        if not isinstance(parent, fx.Node):
            continue
        for tensor in tensors_of(parent):
            if tensor.dtype in FLOATS:
                continue
            if index != place:
                return f"it takes {_dtype(tensor)}, but the chip computes with floats"
            if parent.op == "get_attr" or tensor.dtype not in (torch.int64, torch.int32):
                return (
                    f"its indices must be int32 or int64 inputs, not {_dtype(tensor)} or a constant of "
                    "the graph"
                )
    if is_size(node) or is_view(node):
        return None
    others = [parent for parent in node.all_input_nodes if parent not in node.args]
    if any(tensor.dtype not in FLOATS for parent in others for tensor in tensors_of(parent)):
        return "it takes tensors that are not floats"
    return None


def _index_argument(node: fx.Node) -> int | None:
    return _LOOKUPS.get(_name(node)) if node.op == "call_function" else None


def _name(node: fx.Node) -> str:
    op = overload(node)
    return op._schema.name if op is not None else ""


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
