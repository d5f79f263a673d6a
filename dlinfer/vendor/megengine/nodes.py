"""A graph as a plain list of nodes. ``builder.py`` turns it into a MegEngine model in the toolchain's environment.

The list has some twenty kinds of ops, each a call of ``megengine.functional``. Tensors are named. ONNX is no
alternative: MegEngine's package cannot import it, and its old converters are no longer maintained."""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.ir.dialect import fake


class UntranslatableError(RefusedError):
    """A node has no translation. The message says why."""


@dataclass(frozen=True)
class Value:
    """A tensor of a node list: its name in the list, and its sizes and dtype in torch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class NodeList:
    """A list of nodes. Translations add one op after the other.

    inputs: for each input its name, sizes and type at Lite's boundary (``BOUNDARY``). outputs: names.
    indices: name of an integer input that looks up rows -> number of rows."""

    inputs: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    indices: dict[str, int] = field(default_factory=dict)

    def op(
        self, kind: str, *operands: Any, like: Any, dtype: torch.dtype | None = None, **attributes: Any
    ) -> Value:
        """Add a node of kind ``kind``, and return its result. operands: Values and numbers.

        like: a tensor with the result's sizes, or the sizes. dtype: the result's; None means that of the first
            Value."""
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
"""torch's dtype of an input -> its type at Lite's boundary. int64 is for row numbers only, whose range is checked; bool
is passed as bytes."""


def unfit(tensor: torch.Tensor) -> str | None:
    """Return why MegEngine cannot take a tensor of this dtype and these sizes; None if it can."""
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
    """Add an input for a placeholder to the list, and return it. Raises UntranslatableError."""
    tensor = fake(node)
    if not isinstance(tensor, torch.Tensor):
        raise UntranslatableError("an input is not a tensor")
    value = Value(node.name, tuple(tensor.shape), tensor.dtype)
    writer.inputs.append((node.name, value.shape, BOUNDARY[tensor.dtype]))
    return value
