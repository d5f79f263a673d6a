"""Ports: descriptions of the tensors and integers that a compiled graph takes and returns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.graph.ir.conj_neg import is_lazy
from dlinfer.graph.ir.device import HOST
from dlinfer.graph.torch_private.expressions import Size

Range = tuple[int, int | None]
"""The lowest and the highest value of a size; None if there is no highest value."""

ANY_NUMBER: Range = (-(1 << 63), None)
"""The range of an integer whose value is not checked."""


def is_plain(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and not value.is_nested


@dataclass(frozen=True)
class Port:
    """One tensor or integer that a graph takes or returns.

    sizes: expressions over the interface's symbols. None stands for a size that is not checked, or is known only after
        a run.
    bounds: the range of each size.
    strides: the required strides; None requires a contiguous tensor.
    offset: the required storage offset, in elements; None allows any offset.
    number: whether the port takes an integer; then ``sizes`` has one expression, for the integer.
    written: whether the graph writes into the tensor.
    held: whether the graph keeps the tensor between calls, as it keeps weights.
    resolved: whether the graph itself resolves conj and neg bits.

    If a tensor has a conj or neg bit, or must be contiguous and is not, the call passes a copy to the graph. But a copy
    would be wrong for a tensor that the graph writes or holds, so the call is refused. A call is also refused if a
    tensor lacks the required strides.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[Size | None, ...]
    bounds: tuple[Range, ...]
    device: torch.device
    strides: tuple[Size, ...] | None = None
    offset: int | None = None
    number: bool = False
    written: bool = False
    held: bool = False
    resolved: bool = False

    @classmethod
    def of_number(cls, name: str, value: Size | None, bounds: Range = ANY_NUMBER) -> "Port":
        """Return the port of an integer.

        value: the expression of the integer; None if it is not checked. bounds: the range of the integer.
        """
        return cls(name, torch.int64, (value,), (bounds,), torch.device(HOST), number=True)

    @property
    def may_be_copied(self) -> bool:
        return not (self.written or self.held or self.number)

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The sizes: a number if a size is fixed, its expression as text if it may change, ``?`` if unknown."""
        if self.number:
            return ()
        return tuple(
            "?" if size is None else str(size) if size.fixed is None else size.fixed for size in self.sizes
        )

    @property
    def max_shape(self) -> tuple[int, ...]:
        """The highest value of each size; -1 for a size without a limit."""
        return () if self.number else tuple(-1 if high is None else high for _, high in self.bounds)

    @property
    def is_dynamic(self) -> bool:
        return any(low != high for low, high in self.bounds)

    def misfit(self, value: object) -> str:
        """Describe a value that does not fit this port, as text for an error. The text shows only the first misfit."""
        if not isinstance(value, torch.Tensor) or self.number or not is_plain(value):
            return shown(value)
        if value.dtype != self.dtype or value.device != self.device:
            return f"{value.dtype} {tuple(value.shape)} on {value.device}"
        if is_lazy(value) and not (self.may_be_copied or self.resolved):
            return "a lazily conjugated or negated tensor: call resolve_conj() or resolve_neg()"
        if self.offset is not None and value.storage_offset() != self.offset:
            place = f"a tensor that begins at element {value.storage_offset()} of its memory"
            return place if self.offset else f"{place}: pass its clone()"
        return f"sizes {tuple(value.shape)} with strides {value.stride()}"

    def __str__(self) -> str:
        if self.number:
            is_any = self.bounds[0] in ((0, None), ANY_NUMBER)
            return "a number of type int" + ("" if is_any else f", {_range(self.bounds[0])}")
        layout = "contiguous" if self.strides is None else f"strides ({', '.join(map(str, self.strides))})"
        place = "" if self.offset is None else f" starting at element {self.offset} of its memory"
        return f"{self.dtype} [{', '.join(map(_range, self.bounds))}] {layout} on {self.device}{place}"


def _range(bounds: Range) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}..{'' if high is None else high}"


def bounds_of(sizes: Iterable[Size | None], symbols: Mapping[str, Range]) -> tuple[Range, ...]:
    """Return the range of each size. symbols: symbol -> its range. Raises KeyError for an unknown symbol."""
    limits = [(0, None) if size is None else size.bounds(symbols) for size in sizes]
    return tuple((low or 0, high) for low, high in limits)


def shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        is_short = isinstance(value, (int, float, str, type(None)))
        return repr(value) if is_short else f"a {type(value).__name__}"
    if not is_plain(value):
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
        return f"a {kind} tensor of {value.dtype}"
    layout = "contiguous" if value.is_contiguous() else f"strides {value.stride()}"
    layout += ", lazily conjugated or negated" if is_lazy(value) else ""
    return f"a {value.dtype} tensor of sizes {tuple(value.shape)}, {layout}, on {value.device}"
