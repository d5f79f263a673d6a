"""A model with initializers for some inputs: as bytes, or as a file with the tensors beside it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from dlinfer.graph.onnx.export import OnnxGraph

if TYPE_CHECKING:
    import onnx_ir

INLINE_BYTES = 1 << 20
"""Weights up to this total size are stored in the model's file by default."""


def fill(graph: OnnxGraph, weights: Mapping[str, Tensor]) -> list["onnx_ir.Value"]:
    """Turn inputs of a graph, by name, into initializers on the tensors' memory. Returns their values."""
    import onnx_ir

    body = graph.model.graph
    held = [value for value in body.inputs if value.name in weights]
    for value in held:
        body.inputs.remove(value)
        value.const_value = onnx_ir.tensor(weights[str(value.name)].detach().contiguous(), name=value.name)
        body.initializers[str(value.name)] = value
    return held


@dataclass(frozen=True)
class OnnxModel:
    """A graph, and tensors for some of its inputs by name, which become initializers.

    Nothing is copied or written in advance, and the graph keeps no reference to the tensors.
    """

    graph: OnnxGraph
    weights: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self.weights.values())

    def to_bytes(self) -> bytes:
        """The whole model as ONNX's protobuf, which takes at most 2 GiB; ``save`` takes more."""
        with self.filled():
            return self.graph.to_bytes()

    def save(self, folder: Path, inline: int = INLINE_BYTES) -> Path:
        """Write ``model.onnx`` into a folder, weights of more than ``inline`` bytes in a file beside it; its path."""
        import onnx_ir

        path = folder / "model.onnx"
        with self.filled() as model:
            data = "weights.bin" if self.nbytes > inline else None
            onnx_ir.save(model, path, external_data=data)  # pyright: ignore[reportUnknownMemberType]
        return path

    @contextmanager
    def filled(self) -> Generator["onnx_ir.Model"]:
        """The ``onnx_ir.Model`` while it has the weights in it. One thread at a time for one graph."""
        body = self.graph.model.graph
        inputs = list(body.inputs)
        held = fill(self.graph, self.weights)
        try:
            yield self.graph.model
        finally:
            for value in held:
                del body.initializers[str(value.name)]
                value.const_value = None
            for place, value in enumerate(inputs):
                if value in held:
                    body.inputs.insert(place, value)
