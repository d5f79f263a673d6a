"""New contents of an input that are no tensor of the model: rows of it, or what an op of the model wrote in place.

OpenVINO has no op that writes into its input: ``index_copy`` of a few rows would copy the whole cache, at each call
and in each layer. So such a value is kept as its parts: the old content, the rows, and where they go. Attention reads
the parts; the rows are results of the model, and torch writes them into the cache's own memory behind it.
"""

from dataclasses import dataclass
from typing import Any

import openvino as ov
import openvino.opset16 as op
from openvino import Output


@dataclass
class Rows:
    """base: the old content. index: i64 [rows], places along ``dim``. source: the new rows, of base's sizes but for
    ``dim``. sizes: those of base as fakes, with the number of rows in the place of ``dim``. unique: no place repeats,
    since a slice is written. full: the whole, where it was needed."""

    base: Output
    dim: int
    index: Output
    source: Output
    sizes: tuple[Any, ...]
    unique: bool = False
    full: Output | None = None

    def whole(self) -> Output:
        """``full``, put together once."""
        if self.full is None:
            self.full = self.put()
        return self.full

    def put(self) -> Output:
        """The whole new content."""
        dim = op.constant(self.dim, ov.Type.i64)
        return op.scatter_update(self.base, self.index, self.source, dim).output(0)


@dataclass(frozen=True)
class InPlace:
    """The memory of an input, whose new content an op of the model writes there itself. parameter: the input."""

    parameter: Output
