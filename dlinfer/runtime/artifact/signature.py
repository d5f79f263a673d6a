"""The signature of an entry: what goes in and what comes out, by name, and how a call is judged by it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.ir.conj_neg import is_lazy
from dlinfer.graph.ir.specs import is_plain
from dlinfer.graph.torch_private.expressions import Size

Bounds = tuple[int, int | None]
"""The lowest and the highest that a size may be; None where there is no highest."""


@dataclass(frozen=True)
class Port:
    """One tensor that an entry takes or gives.

    sizes: each an integer or an expression over the entry's symbols; None where only running it tells.
    bounds: for each size, what it may be. strides: None for a contiguous tensor.
    number: it is an integer and no tensor; then ``sizes`` is the one expression for its value.
    written: a tensor that the graph writes into. scale: the quantisation scale, 1.0 where there is none.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[Size | None, ...]
    bounds: tuple[Bounds, ...]
    device: torch.device
    strides: tuple[Size, ...] | None = None
    number: bool = False
    written: bool = False
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Its sizes: numbers, and the text of those that may change."""
        if self.number:
            return ()
        return tuple(
            "?" if size is None else str(size) if size.fixed is None else size.fixed for size in self.sizes
        )

    @property
    def max_shape(self) -> tuple[int, ...]:
        """The highest of each size, -1 where there is none."""
        return () if self.number else tuple(-1 if high is None else high for _, high in self.bounds)

    @property
    def is_dynamic(self) -> bool:
        """Whether a size of it may change."""
        return any(low != high for low, high in self.bounds)

    def __str__(self) -> str:
        if self.number:
            return f"an integer {_range(self.bounds[0])}"
        layout = "contiguous" if self.strides is None else f"strides {', '.join(map(str, self.strides))}"
        sizes = ", ".join(map(_range, self.bounds))
        return f"{self.dtype} [{sizes}] {layout} on {self.device}"


def _range(bounds: Bounds) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}..{'' if high is None else high}"


@dataclass(frozen=True)
class Signature:
    """What an entry takes and gives, in the order of its graph.

    symbols: what each symbol may be. conditions: comparisons that must be true of the symbols at each call.
    examples: what the symbols were in the call that the graph was compiled with, where that is known.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    symbols: Mapping[str, Bounds]
    conditions: tuple[Size, ...] = ()
    examples: Mapping[str, int] = field(default_factory=dict)

    def usual(self, symbol: str) -> int:
        """Return a value of a symbol that is as good as any: the example's, or the lowest above 0."""
        return self.examples.get(symbol, max(1, self.symbols[symbol][0]))

    @property
    def is_dynamic(self) -> bool:
        """Whether any size may change from call to call."""
        return any(port.is_dynamic for port in (*self.inputs, *self.outputs))

    def check(self, values: Sequence[Any]) -> dict[str, int]:
        """Return the value of each symbol in a call with these inputs, in order. Raises ArtifactInputError."""
        symbols: dict[str, int] = {}
        later: list[tuple[Port, Size, int]] = []
        for port, value in zip(self.inputs, values, strict=True):
            if not _alike(port, value):
                raise ArtifactInputError(name=port.name, expected=port, given=shown(value))
            given = (value,) if port.number else value.shape
            if len(given) != len(port.sizes):
                raise ArtifactInputError(name=port.name, expected=port, given=shown(value))
            for size, want, (low, high) in zip(given, port.sizes, port.bounds, strict=True):
                if size < low or (high is not None and size > high):
                    raise ArtifactInputError(name=port.name, expected=port, given=shown(value))
                assert want is not None
                if want.fixed is not None:
                    continue
                if want.symbol is None:
                    later.append((port, want, size))
                elif symbols.setdefault(want.symbol, size) != size:
                    expected = f"{port}, where {want} is {symbols[want.symbol]}"
                    raise ArtifactInputError(name=port.name, expected=expected, given=shown(value))
        for port, want, size in later:
            if want.evaluate(symbols) != size:
                raise ArtifactInputError(name=port.name, expected=f"a size that is {want}", given=size)
        for condition in self.conditions:
            _hold(condition, symbols)
        for port, value in zip(self.inputs, values, strict=True):
            if port.strides is not None and not port.number:
                strides = tuple(stride.evaluate(symbols) for stride in port.strides)
                if value.stride() != strides:
                    raise ArtifactInputError(name=port.name, expected=port, given=shown(value))
        return symbols


def _hold(condition: Size, symbols: Mapping[str, int]) -> None:
    try:
        true = condition.evaluate(symbols)
    except ZeroDivisionError:
        true = False
    if not true:
        given = ", ".join(f"{name} = {symbols[name]}" for name in condition.symbols)
        raise ArtifactInputError(name="sizes", expected=condition, given=given)


def _alike(port: Port, value: Any) -> bool:
    """Whether a value has the port's kind, dtype, device and layout."""
    if port.number:
        return type(value) is int
    return (
        isinstance(value, torch.Tensor)
        and is_plain(value)
        and value.dtype is port.dtype
        and value.device == port.device
        and not is_lazy(value)
        and (port.strides is not None or value.is_contiguous())
    )


def shown(value: Any) -> str:
    """Return a given value for people."""
    if not isinstance(value, torch.Tensor):
        return (
            repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"
        )
    if not is_plain(value):
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
        return f"a {kind} tensor of {value.dtype}"
    layout = "" if value.is_contiguous() else f" with strides {value.stride()}"
    layout += ", lazily conjugated or negated," if is_lazy(value) else ""
    return f"{value.dtype} of sizes {tuple(value.shape)}{layout} on {value.device}"
