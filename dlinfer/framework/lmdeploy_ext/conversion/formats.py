"""Defines the formats of quantised weights: their tensors' names, layouts and rounding.

Every format quantises a weight in blocks of at most ``ROWS`` rows, and the result of a block depends on this block
alone. So a large weight can be quantised piece by piece.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlinfer.ops.quantised.packing import AWQ, Packing

ROWS = 128
"""A piece of a weight has a multiple of this many rows, so that it holds whole FP8 blocks and whole AWQ words."""

GROUP_SIZES = (32, 64, 128)
"""Group sizes that AWQ kernels support: LMDeploy's CUDA kernels need a power of two, TurboMind needs 128."""

_LARGEST_FP8 = 448.0
_LARGEST_INT8 = 127.0


def pieces(weight: Tensor, most: int) -> tuple[Tensor, ...]:
    """Split a weight [out, in] by rows into pieces of at most ``most`` elements.

    A piece has a multiple of ``ROWS`` rows, except the last. If ``ROWS`` rows have more than ``most`` elements, each
    piece has ``ROWS`` rows.
    """
    return weight.split(max(most // max(weight.shape[1], 1) // ROWS, 1) * ROWS)


Parts = dict[str, tuple[str, tuple[int, ...]]]
"""Last part of a tensor's name -> (safetensors' name of its dtype, its shape)."""


class Format(ABC):
    """A format of quantised weights. A floating-point weight is [out_features, in_features].

    name: the format's name on the command line.
    shared: the value of ``group`` for a format without a group size.
    dtype: the dtype to write into ``config.json``; None keeps the model's dtype.
    joined: the dimension along which the quantised tensors of a weight's pieces are concatenated.
    """

    name: ClassVar[str]
    shared: ClassVar[str]
    dtype: ClassVar[str | None] = None
    joined: ClassVar[int] = 0

    @property
    def group(self) -> str:
        """A text that says which elements share a scale, with the group size if the format has one."""
        return self.shared

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the ``quantization_config`` for config.json."""

    def fault(self, out_features: int, in_features: int) -> str:
        """Return a reason that a weight of this size cannot be quantised; an empty text if it can."""
        return ""

    @abstractmethod
    def parts(self, out_features: int, in_features: int) -> Parts:
        """Return how a weight of this size is stored: a dict from last part of a tensor's name to (dtype, shape)."""

    @abstractmethod
    def quantise(self, rows: Tensor) -> dict[str, Tensor]:
        """Quantise rows of a floating-point weight, and return the tensors that ``parts`` names.

        rows: all rows of the weight, or a piece with a multiple of ``ROWS`` rows.
        """

    @abstractmethod
    def dequantise(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the rows of a weight as float32 [rows, in_features]. parts: the tensors that ``quantise`` returns."""


@dataclass(frozen=True)
class AwqInt4(Format):
    """AutoAWQ's 4-bit layout "gemm". ``group_size`` neighbours in a row share a zero point and a float16 scale."""

    name = "awq-int4"
    dtype = "float16"  # LMDeploy serves AWQ in float16, whatever the configuration says
    joined = 1

    group_size: int = 128

    @property
    def group(self) -> str:
        return f"{self.group_size} of a row"

    def config(self) -> dict[str, Any]:
        own = {"quant_method": "awq", "bits": AWQ.bits, "group_size": self.group_size, "zero_point": True}
        return own | {"version": "gemm", "modules_to_not_convert": ["lm_head"]}

    def fault(self, out_features: int, in_features: int) -> str:
        if in_features % self.group_size:
            return f"{in_features} inputs are not a multiple of the group size {self.group_size}"
        if out_features % AWQ.per_word:
            return f"{out_features} outputs are not a multiple of {AWQ.per_word}, the numbers in a word"
        return ""

    def parts(self, out_features: int, in_features: int) -> Parts:
        groups, words = in_features // self.group_size, out_features // AWQ.per_word
        return {
            "qweight": ("I32", (in_features, words)),
            "scales": ("F16", (groups, out_features)),
            "qzeros": ("I32", (groups, words)),
        }

    @property
    def _packing(self) -> Packing:
        return AWQ.of_groups(self.group_size)

    def quantise(self, rows: Tensor) -> dict[str, Tensor]:
        qweight, scales, qzeros = self._packing.quantise(rows.t())
        assert qzeros is not None
        return {"qweight": qweight, "scales": scales, "qzeros": qzeros}

    def dequantise(self, parts: dict[str, Tensor]) -> Tensor:
        words, scales, zeros = parts["qweight"], parts["scales"], parts["qzeros"]
        return self._packing.dequantise(words, scales, zeros, torch.float32).t()


@dataclass(frozen=True)
class W8A8(Format):
    """LMDeploy's "smooth_quant": symmetric int8, with a float32 scale for each row."""

    name = "w8a8"
    shared = "a row"

    def config(self) -> dict[str, Any]:
        return {"quant_method": "smooth_quant", "quant_dtype": "int8"}

    def parts(self, out_features: int, in_features: int) -> Parts:
        return {"weight": ("I8", (out_features, in_features)), "scale": ("F32", (out_features, 1))}

    def quantise(self, rows: Tensor) -> dict[str, Tensor]:
        wide = rows.float()
        scale = _scale(wide.abs().amax(1, keepdim=True), _LARGEST_INT8)
        numbers = (wide / scale).round().clamp(-_LARGEST_INT8, _LARGEST_INT8)
        return {"weight": numbers.to(torch.int8), "scale": scale}

    def dequantise(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["weight"].float() * parts["scale"]


@dataclass(frozen=True)
class BlockedFp8(Format):
    """DeepSeek's blocked FP8: float8_e4m3fn numbers with a float32 scale for each block of 128 rows and 128 columns.

    A weight is its stored number times ``weight_scale_inv``. That name misleads, because the scale is not inverted.
    """

    name = "fp8"
    shared = "a block of 128 x 128"
    block: int = 128

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block, self.block],
            "modules_to_not_convert": ["lm_head"],
        }

    def fault(self, out_features: int, in_features: int) -> str:
        for size, kind in ((out_features, "outputs"), (in_features, "inputs")):
            if size % self.block:
                return f"{size} {kind} are not a multiple of the block size {self.block}"
        return ""

    def parts(self, out_features: int, in_features: int) -> Parts:
        blocks = (out_features // self.block, in_features // self.block)
        return {"weight": ("F8_E4M3", (out_features, in_features)), "weight_scale_inv": ("F32", blocks)}

    def quantise(self, rows: Tensor) -> dict[str, Tensor]:
        blocks = rows.float().unflatten(1, (-1, self.block)).unflatten(0, (-1, self.block))
        scale = _scale(blocks.abs().amax((1, 3)), _LARGEST_FP8)
        numbers = (blocks / scale[:, None, :, None]).clamp(-_LARGEST_FP8, _LARGEST_FP8)
        return {"weight": numbers.reshape(rows.shape).to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    def dequantise(self, parts: dict[str, Tensor]) -> Tensor:
        scale = parts["weight_scale_inv"]
        wide = scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return parts["weight"].float() * wide


def _scale(largest: Tensor, levels: float) -> Tensor:
    """Return ``largest / levels``, but at least the smallest normal float32, so that a scale is never 0.

    largest: the largest absolute value of each block. levels: the largest number of the quantised dtype.
    """
    return (largest / levels).clamp(min=torch.finfo(torch.float32).tiny)


FORMATS: dict[str, type[Format]] = {form.name: form for form in (AwqInt4, W8A8, BlockedFp8)}
"""Name of a format -> its class."""
