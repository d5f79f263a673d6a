"""Turn some inputs of a model into initializers, and write the model as bytes or as files."""

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
"""The largest total size of weights, in bytes, that the model's file itself stores by default."""


def fill(graph: OnnxGraph, weights: Mapping[str, Tensor]) -> list["onnx_ir.Value"]:
    """Turn the inputs that ``weights`` names into initializers, and return the ``onnx_ir`` values of these inputs.

    weights: name of an input -> its tensor. The initializer uses the tensor's memory. A tensor that is not contiguous
        is copied.
    """
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
    """A graph with tensors for some of its inputs. These inputs become initializers in the written model.

    weights: name of an input -> its tensor. Nothing is copied before the model is written. Afterwards the graph keeps
        no reference to the tensors.
    """

    graph: OnnxGraph
    weights: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes."""
        return sum(weight.nbytes for weight in self.weights.values())

    def to_bytes(self) -> bytes:
        """Return the whole model as ONNX's protobuf, at most 2 GiB. ``save`` writes larger models too."""
        with self.filled():
            return self.graph.to_bytes()

    def save(self, folder: Path, inline: int = INLINE_BYTES) -> Path:
        """Write ``model.onnx`` into a folder, and return the file's path.

        If the weights have more than ``inline`` bytes together, they go into a second file, ``weights.bin``.
        """
        import onnx_ir

        path = folder / "model.onnx"
        with self.filled() as model:
            data = "weights.bin" if self.nbytes > inline else None
            onnx_ir.save(model, path, external_data=data)  # pyright: ignore[reportUnknownMemberType]
        return path

    @contextmanager
    def filled(self) -> Generator["onnx_ir.Model"]:
        """Yield the ``onnx_ir.Model``. It contains the weights until the ``with`` block ends.

        Only one thread at a time may use this.
        """
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
