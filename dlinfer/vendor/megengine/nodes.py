"""A graph as a plain list of nodes. ``builder.py`` turns it into a MegEngine model in the toolchain's environment.

The list has some twenty ops, each a call of ``megengine.functional``; it refers to tensors by name. ONNX would not do:
MegEngine's package cannot import it, and its old converters are no longer maintained.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.ir.dialect import fake


class UntranslatableError(RefusedError):
    """A node has no translation; the message is the reason."""


@dataclass(frozen=True)
class Value:
    """A tensor of the list: its name, and torch's sizes and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class NodeList:
    """The list of nodes, built op by op.

    inputs: (name, sizes, type at Lite's boundary). indices: integer input that looks up rows -> number of rows.
    outputs: names.
    """

    inputs: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    indices: dict[str, int] = field(default_factory=dict)

    def op(
        self, kind: str, *operands: Any, like: Any, dtype: torch.dtype | None = None, **attributes: Any
    ) -> Value:
        """Add a node. operands: Values and numbers. like: a tensor or the sizes of the result."""
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
"""Types of inputs: int64 looks up rows only and is range-checked, bool passes as bytes."""


def unfit(tensor: torch.Tensor) -> str | None:
    """Return why MegEngine cannot take a tensor's dtype or sizes, or None."""
    if tensor.dtype == torch.float16:
        return "float16, which is hundreds of times slower than float32 in MegEngine's CPU kernels"
    if tensor.dtype not in BOUNDARY:
        return f"{str(tensor.dtype).removeprefix('torch.')}, which MegEngine Lite lacks"
    if not all(isinstance(size, int) for size in tensor.shape):
        return "its sizes change between calls, but a model needs fixed sizes (dynamic=False fixes them)"
    if not 1 <= tensor.ndim <= 6:
        return f"a tensor of {tensor.ndim} dimensions; MegEngine Lite takes 1 to 6"
    if tensor.numel() == 0:
        return "a tensor without elements"
    return None


def placeholder(writer: NodeList, node: fx.Node) -> Value:
    """Add an input to the list for a placeholder. Raises UntranslatableError."""
    tensor = fake(node)
    if not isinstance(tensor, torch.Tensor):
        raise UntranslatableError("an input that is no tensor")
    value = Value(node.name, tuple(tensor.shape), tensor.dtype)
    writer.inputs.append((node.name, value.shape, BOUNDARY[tensor.dtype]))
    return value
