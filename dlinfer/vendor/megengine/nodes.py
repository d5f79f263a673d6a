"""A graph as a plain list of nodes. ``builder.py`` turns the list into a MegEngine model.

There are some twenty kinds of nodes; each is one call of ``megengine.functional``. Nodes name their tensors. The list
is not ONNX, because MegEngine's package cannot import ONNX and its old converters are no longer maintained."""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.ir.dialect import fake


class UntranslatableError(RefusedError):
    """A node of the graph has no translation. The message gives the reason."""


@dataclass(frozen=True)
class Value:
    """A tensor of a node list. name: its name in the list. shape, dtype: its sizes and dtype in torch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class NodeList:
    """A list of nodes, which translations extend node by node.

    inputs: name, sizes and dtype of each input. The dtype is Lite's, which may differ from torch's (``BOUNDARY``).
    outputs: the names of the results.
    indices: name of an input that holds indices of an embedding -> the number of rows of the embedding's table."""

    inputs: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    indices: dict[str, int] = field(default_factory=dict)

    def op(
        self, kind: str, *operands: Any, like: Any, dtype: torch.dtype | None = None, **attributes: Any
    ) -> Value:
        """Add a node of kind ``kind``, and return its result.

        operands: Values and numbers. attributes: the node's other arguments.
        like: the sizes of the result, or a tensor that has these sizes.
        dtype: the result's dtype; None means the dtype of the first Value among ``operands``."""
        shape = tuple(like.shape) if isinstance(like, (torch.Tensor, Value)) else tuple(like)
        default = next((operand.dtype for operand in operands if isinstance(operand, Value)), torch.float32)
        value = Value(f"v{len(self.nodes)}", shape, dtype or default)
        encoded = [{"ref": item.name} if isinstance(item, Value) else item for item in operands]
        self.nodes.append({"name": value.name, "op": kind, "operands": encoded, "attributes": attributes})
        return value

    def __str__(self) -> str:
        return "\n".join(
            f"{node['name']} = {node['op']}({', '.join(map(str, node['operands']))}) {node['attributes'] or ''}"
            for node in self.nodes
        )

    def text(self) -> str:
        parts = {"inputs": self.inputs, "nodes": self.nodes, "outputs": self.outputs}
        return json.dumps(parts, sort_keys=True)


BOUNDARY = {torch.float32: "float32", torch.int32: "int32", torch.int64: "int32", torch.bool: "uint8"}
"""torch's dtype of an input -> the dtype that Lite gets.

Only indices of an embedding may be int64: their range is checked before they become int32. bool is passed as bytes."""


def unfit(tensor: torch.Tensor) -> str | None:
    """Return a reason to refuse a tensor with this dtype and these sizes; None if MegEngine takes it."""
    if tensor.dtype == torch.float16:
        return "it uses float16, which is hundreds of times slower than float32 in MegEngine's CPU kernels"
    if tensor.dtype not in BOUNDARY:
        return f"it uses {str(tensor.dtype).removeprefix('torch.')}, which MegEngine Lite lacks"
    if not all(isinstance(size, int) for size in tensor.shape):
        return "its sizes change between calls, but a model needs fixed sizes (dynamic=False fixes them)"
    if not 1 <= tensor.ndim <= 6:
        return f"it uses a tensor of {tensor.ndim} dimensions, but MegEngine Lite takes 1 to 6"
    if tensor.numel() == 0:
        return "it uses a tensor without elements"
    return None


def placeholder(writer: NodeList, node: fx.Node) -> Value:
    """Add an input for a placeholder of the graph to the list, and return the input. Raises UntranslatableError."""
    tensor = fake(node)
    if not isinstance(tensor, torch.Tensor):
        raise UntranslatableError("an input is not a tensor")
    value = Value(node.name, tuple(tensor.shape), tensor.dtype)
    writer.inputs.append((node.name, value.shape, BOUNDARY[tensor.dtype]))
    return value
