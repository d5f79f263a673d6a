"""Decide which steps are captured: their batch sizes, the limits, and the reasons not to capture a step.

One policy serves all devices with graphs like CUDA's, because it reads only sizes and LMDeploy's metadata.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_DOUBLING, _FINE = 16, 256  # sizes double up to the first, and are its multiples up to the second
_TAKEN = {"input_ids", "position_ids", "past_key_values", "attn_metadata"}
PREFILL = "a prefill, whose number of tokens is seldom the same twice"


def compatible_size(size: int) -> int:
    """Return the smallest batch size of captured graphs that is at least ``size``."""
    if size <= _DOUBLING:
        return 1 << max(size - 1, 0).bit_length()
    step = _DOUBLING if size <= _FINE else _FINE
    return -(-size // step) * step


@dataclass(frozen=True)
class CapturePolicy:
    """The limits for capturing steps.

    largest: the most sequences of a captured step.
    most_graphs: the most graphs that are kept. Each graph keeps the working memory of a step.
    least_free: the fraction of the device's memory that must be free for another capture.
    adapters: whether the model has LoRA adapters. LMDeploy's inputs do not tell, because they always have adapter ids.
    """

    largest: int
    most_graphs: int = 32
    least_free: float = 0.02
    adapters: bool = False

    def size(self, batch: int) -> int:
        """Return the number of rows of the graph that serves ``batch`` sequences."""
        return min(compatible_size(batch), self.largest)

    def why_not(self, inputs: Mapping[str, Any]) -> str | None:
        """Return a reason not to capture a forward with these inputs; None if it can be captured.

        inputs: LMDeploy's keyword arguments of the forward. The reason holds for all forwards with such inputs.
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
            return "a quantised cache, whose ops read values on the host"
        if inputs["position_ids"].shape[0] != 1:
            return "rotary frequencies that depend on lengths"
        if inputs["input_ids"].shape[1] != meta.kv_seqlens.shape[0]:
            return "several new tokens for one sequence"
        if meta.kv_seqlens.shape[0] > self.largest:
            return f"more than {self.largest} sequences"
        return None

    def why_not_another(self, graphs: int, free: int, total: int) -> str | None:
        """Return a reason not to capture another graph; None if another graph may be captured.

        graphs: the number of graphs so far. free, total: bytes of the device's memory.
        """
        if graphs >= self.most_graphs:
            return f"the limit of {self.most_graphs} graphs is reached"
        if free < total * self.least_free:
            return f"less than {self.least_free:.0%} of the device's memory is free"
        return None


def places(tensors: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return (address, shape) of each tensor. A captured graph is valid only while these stay the same."""
    return tuple((t.data_ptr(), tuple(t.shape)) for t in tensors if isinstance(t, torch.Tensor))
