"""Which steps are captured: the batch sizes, the limits, and the reasons of what is not.

One policy for all devices whose graphs are like CUDA's: it knows sizes and LMDeploy's metadata, and no device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_DOUBLING, _FINE = 16, 256  # sizes double up to the first, and are its multiples up to the second
_TAKEN = {"input_ids", "position_ids", "past_key_values", "attn_metadata"}
PREFILL = "prompts: their numbers of tokens are seldom the same twice"


def compatible_size(size: int) -> int:
    """The least batch size, not below ``size``, that a graph is captured for."""
    if size <= _DOUBLING:
        return 1 << max(size - 1, 0).bit_length()
    step = _DOUBLING if size <= _FINE else _FINE
    return -(-size // step) * step


@dataclass(frozen=True)
class CapturePolicy:
    """The limits of captures.

    largest: the most sequences of a captured step. most_graphs: how many graphs are kept at once; each keeps the
    working memory of a step. least_free: the part of the device's memory that a capture has to leave free.
    adapters: whether the model has LoRA adapters; LMDeploy numbers those of rows where it has none, too.
    """

    largest: int
    most_graphs: int = 32
    least_free: float = 0.02
    adapters: bool = False

    def size(self, batch: int) -> int:
        """How many rows the graph of a batch has."""
        return min(compatible_size(batch), self.largest)

    def why_not(self, inputs: Mapping[str, Any]) -> str | None:
        """Why a forward is not captured whatever the graphs there are; None where it may be.

        inputs: LMDeploy's keywords of it.
        """
        meta = inputs["attn_metadata"]
        if not meta.is_decoding:
            return PREFILL
        extra = sorted(name for name, value in inputs.items() if value is not None and name not in _TAKEN)
        if extra:
            return f"inputs that have no buffer: {', '.join(extra)}"
        if self.adapters:
            return "LoRA adapters, whose rows are grouped by values"
        if meta.quant_policy:
            return "a quantised cache, whose ops look at values on the host"
        if inputs["position_ids"].shape[0] != 1:
            return "rotary frequencies that depend on lengths"
        if inputs["input_ids"].shape[1] != meta.kv_seqlens.shape[0]:
            return "several new tokens of a sequence"
        if meta.kv_seqlens.shape[0] > self.largest:
            return f"more than {self.largest} sequences"
        return None

    def why_not_another(self, graphs: int, free: int, total: int) -> str | None:
        """Why no further graph is captured, where ``graphs`` are kept and so many bytes are free of so many."""
        if graphs >= self.most_graphs:
            return f"{self.most_graphs} graphs are kept already"
        if free < total * self.least_free:
            return f"less than {self.least_free:.0%} of the device's memory is free"
        return None


def places(tensors: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Where tensors lie and of what sizes they are: a graph belongs to these."""
    return tuple((t.data_ptr(), tuple(t.shape)) for t in tensors if isinstance(t, torch.Tensor))
