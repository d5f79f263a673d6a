"""A graph as a plain list of nodes, which the builder in the toolchain's environment makes a MegEngine model of.

Why not ONNX: MegEngine's package has no importer of it, and the converters that there were are gone with it. The list
has some twenty ops, each one call of ``megengine.functional`` (``builder.py``), and tensors by name.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.ir.dialect import fake


class UntranslatableError(RefusedError):
    """A node has no translation; its text says why."""


@dataclass(frozen=True)
class Value:
    """A tensor of the list, by its name, with torch's sizes and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class NodeList:
    """The list while it is written.

    inputs: (name, sizes, type at Lite's boundary). indices: for an int64 or int32 input that looks up rows, how many
    rows there are. outputs: names.
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
        kept = next((one.dtype for one in operands if isinstance(one, Value)), torch.float32)
        value = Value(f"v{len(self.nodes)}", shape, dtype or kept)
        written = [{"ref": one.name} if isinstance(one, Value) else one for one in operands]
        self.nodes.append({"name": value.name, "op": kind, "operands": written, "attributes": attributes})
        return value

    def __str__(self) -> str:
        return "\n".join(
            f"{node['name']} = {node['op']}({', '.join(map(str, node['operands']))}) {node['attributes'] or ''}"
            for node in self.nodes
        )

    def text(self) -> str:
        """As JSON."""
        parts = {"inputs": self.inputs, "nodes": self.nodes, "outputs": self.outputs}
        return json.dumps(parts, sort_keys=True)


BOUNDARY = {torch.float32: "float32", torch.int32: "int32", torch.int64: "int32", torch.bool: "uint8"}
"""Types of inputs: int64 looks up rows only and is range-checked, bool passes as bytes."""


def unfit(tensor: torch.Tensor) -> str | None:
    """Why a tensor's dtype and sizes cannot be MegEngine's; None where they can."""
    if tensor.dtype == torch.float16:
        return "float16, of which MegEngine's CPU kernels take hundreds of times as long as of float32"
    if tensor.dtype not in BOUNDARY:
        return f"{str(tensor.dtype).removeprefix('torch.')}, which MegEngine Lite has not"
    if not all(isinstance(size, int) for size in tensor.shape):
        return (
            "its sizes change between calls, and a model is built for fixed ones (dynamic=False fixes them)"
        )
    if not 1 <= tensor.ndim <= 6:
        return f"a tensor of {tensor.ndim} dimensions; MegEngine Lite has 1 to 6"
    if tensor.numel() == 0:
        return "a tensor without elements"
    return None


def placeholder(writer: NodeList, node: fx.Node) -> Value:
    """Return an input of the list for a placeholder. Raises UntranslatableError."""
    tensor = fake(node)
    if not isinstance(tensor, torch.Tensor):
        raise UntranslatableError("an input that is no tensor")
    given = Value(node.name, tuple(tensor.shape), tensor.dtype)
    writer.inputs.append((node.name, given.shape, BOUNDARY[tensor.dtype]))
    return given
