"""New contents of an input that are not one tensor of the model: some rows of it, or memory written in place.

OpenVINO has no op that writes into its input: ``index_copy`` of a few rows would copy the whole cache, at each call and
in each layer. So the new content stays in parts: the old content, the new rows, and their places. Attention reads the
parts. The new rows are outputs of the model; after the model has run, torch writes them into the cache's own memory."""

from dataclasses import dataclass
from typing import Any

import openvino as ov
import openvino.opset16 as op
from openvino import Output


@dataclass
class Rows:
    """A tensor whose rows at some places are replaced.

    base: the old content.
    index: i64 [rows], the places along ``dim``.
    source: the new rows, with the sizes of ``base`` except along ``dim``.
    sizes: the sizes of the fake tensor of ``source``.
    unique: whether no place repeats.
    full: the whole tensor; None until it is built."""

    base: Output
    dim: int
    index: Output
    source: Output
    sizes: tuple[Any, ...]
    unique: bool = False
    full: Output | None = None

    def whole(self) -> Output:
        """Return the whole tensor, built at the first call."""
        if self.full is None:
            self.full = self.put()
        return self.full

    def put(self) -> Output:
        dim = op.constant(self.dim, ov.Type.i64)
        return op.scatter_update(self.base, self.index, self.source, dim).output(0)


@dataclass(frozen=True)
class InPlace:
    """The memory of the input ``parameter``, which an op of the model overwrites."""

    parameter: Output
