"""What a caller passes to a graph that was compiled ahead of time: tensors and integers, with their bounds."""

from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.graph.ir.conj_neg import is_lazy


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor has elements that lie by strides: it is not sparse, nested or quantized."""
    return value.layout is torch.strided and not value.is_quantized and not value.is_nested


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a caller passes.

    sizes: numbers, or ranges (low, high or None) that the graph takes. strides: None for a contiguous tensor.
    offset: where it has to begin in its memory; None for anywhere.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | tuple[int, int | None], ...]
    strides: tuple[int, ...] | None = None
    offset: int | None = None

    def misfit(self, value: Any) -> str | None:
        """What is wrong with a value for this input; None when nothing is."""
        if not isinstance(value, torch.Tensor):
            return f"a {type(value).__name__}"
        if not is_plain(value):
            return f"a tensor of {value.layout}{', quantized' if value.is_quantized else ''}"
        if is_lazy(value):
            return "a lazily conjugated or negated one: call resolve_conj() or resolve_neg()"
        if value.dtype != self.dtype or value.device != self.device or value.dim() != len(self.sizes):
            return f"{value.dtype} {tuple(value.shape)} on {value.device}"
        for size, wanted in zip(value.shape, self.sizes, strict=True):
            low, high = (wanted, wanted) if isinstance(wanted, int) else wanted
            if size < low or (high is not None and size > high):
                return f"sizes {tuple(value.shape)}"
        if not (value.is_contiguous() if self.strides is None else value.stride() == self.strides):
            return f"sizes {tuple(value.shape)} with strides {value.stride()}"
        if self.offset is not None and value.storage_offset() != self.offset:
            place = f"a tensor that begins at element {value.storage_offset()} of its memory"
            return place if self.offset else f"{place}: pass its clone()"
        return None

    def __str__(self) -> str:
        sizes = ", ".join(
            str(size) if isinstance(size, int) else f"{size[0]}..{'' if size[1] is None else size[1]}"
            for size in self.sizes
        )
        layout = "contiguous" if self.strides is None else f"strides {self.strides}"
        place = "" if self.offset is None else f" from element {self.offset} of its memory on"
        return f"{self.dtype} [{sizes}] {layout} on {self.device}{place}"


@dataclass(frozen=True)
class NumberSpec:
    """One integer that a caller passes and that may change. bounds: what it may be, as a size of TensorSpec."""

    name: str
    bounds: int | tuple[int, int | None]

    def misfit(self, value: Any) -> str | None:
        """What is wrong with a value for this input; None when nothing is."""
        low, high = (self.bounds, self.bounds) if isinstance(self.bounds, int) else self.bounds
        fits = type(value) is int and value >= low and (high is None or value <= high)
        return None if fits else repr(value)

    def __str__(self) -> str:
        return f"an integer of {self.bounds}"
