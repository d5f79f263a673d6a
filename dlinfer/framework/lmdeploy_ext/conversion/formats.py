"""The formats: which tensors a weight becomes, under LMDeploy's names, and how far what they stand for is from it.

All of them quantise rows apart from other rows, or apart from those of other blocks, so that a large weight can be
taken in pieces of ``ROWS`` rows.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dlinfer.ops.quantised.packing import AWQ

ROWS = 128
"""Pieces of a weight are of a multiple of so many rows: a block of FP8, and whole words of AWQ."""

GROUP_SIZES = (32, 64, 128)
"""What kernels for AWQ read: LMDeploy's for CUDA need a power of two, and TurboMind 128."""

_FP8, _LARGEST_FP8 = torch.float8_e4m3fn, 448.0
_LARGEST_INT8 = 127.0


class Format(Protocol):
    """One format. A weight is [out_features, in_features], floating."""

    @property
    def name(self) -> str:
        """How the command calls it."""
        ...

    @property
    def group(self) -> str:
        """Which numbers share a scale, in words."""
        ...

    @property
    def dtype(self) -> str | None:
        """The dtype that ``config.json`` gets; None for the one that it has."""
        ...

    @property
    def joined(self) -> int:
        """The dimension in which the tensors of pieces of rows are joined."""
        ...

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        ...

    def fault(self, out_features: int, in_features: int) -> str:
        """Why a weight of this size cannot be quantised; empty where it can."""
        ...

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Last part of a tensor's name -> safetensors' name of its dtype, and its shape."""
        ...

    def quantise(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of ``parts`` of some whole rows, a multiple of ``ROWS`` or all that there are."""
        ...

    def dequantise(self, parts: dict[str, Tensor]) -> Tensor:
        """The rows, float32 [rows, in_features], that the tensors stand for."""
        ...


@dataclass(frozen=True)
class AwqInt4:
    """AutoAWQ's layout "gemm": 4 bits and a zero point, with float16 scales of group_size neighbours of a row."""

    group_size: int = 128
    name: str = "awq-int4"
    dtype: str | None = "float16"  # LMDeploy serves AWQ in float16, whatever the configuration says
    joined: int = 1

    @property
    def group(self) -> str:
        """Which numbers share a scale, in words."""
        return f"{self.group_size} of a row"

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }

    def fault(self, out_features: int, in_features: int) -> str:
        """Why a weight of this size cannot be quantised; empty where it can."""
        if in_features % self.group_size:
            return f"{in_features} inputs are no multiple of the group size {self.group_size}"
        if out_features % AWQ.per_word:
            return f"{out_features} outputs are no multiple of the {AWQ.per_word} numbers of a word"
        return ""

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Last part of a tensor's name -> safetensors' name of its dtype, and its shape."""
        groups, words = in_features // self.group_size, out_features // AWQ.per_word
        return {
            "qweight": ("I32", (in_features, words)),
            "scales": ("F16", (groups, out_features)),
            "qzeros": ("I32", (groups, words)),
        }

    def quantise(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of ``parts`` of some whole rows."""
        qweight, scales, qzeros = AWQ.of_groups(self.group_size).quantise(rows.t())
        assert qzeros is not None
        return {"qweight": qweight, "scales": scales, "qzeros": qzeros}

    def dequantise(self, parts: dict[str, Tensor]) -> Tensor:
        """The rows, float32, that the tensors stand for."""
        packing = AWQ.of_groups(self.group_size)
        return packing.dequantise(parts["qweight"], parts["scales"], parts["qzeros"], torch.float32).t()


@dataclass(frozen=True)
class W8A8:
    """LMDeploy's "smooth_quant": int8 numbers, symmetric, with a float32 scale for each row."""

    name: str = "w8a8"
    group: str = "a row"
    dtype: str | None = None
    joined: int = 0

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        return {"quant_method": "smooth_quant", "quant_dtype": "int8"}

    def fault(self, out_features: int, in_features: int) -> str:
        """Rows of any length can be quantised."""
        return ""

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Last part of a tensor's name -> safetensors' name of its dtype, and its shape."""
        return {"weight": ("I8", (out_features, in_features)), "scale": ("F32", (out_features, 1))}

    def quantise(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of ``parts`` of some whole rows."""
        wide = rows.float()
        scale = _scale(wide.abs().amax(1, keepdim=True), _LARGEST_INT8)
        numbers = (wide / scale).round().clamp(-_LARGEST_INT8, _LARGEST_INT8)
        return {"weight": numbers.to(torch.int8), "scale": scale}

    def dequantise(self, parts: dict[str, Tensor]) -> Tensor:
        """The rows, float32, that the tensors stand for."""
        return parts["weight"].float() * parts["scale"]


@dataclass(frozen=True)
class BlockedFp8:
    """DeepSeek's blocked FP8: float8_e4m3fn numbers with a float32 scale for each block of 128 rows and 128 columns.

    ``weight_scale_inv`` is what a number is multiplied by, in spite of its name.
    """

    name: str = "fp8"
    group: str = "a block of 128 x 128"
    dtype: str | None = None
    joined: int = 0
    block: int = 128

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block, self.block],
            "modules_to_not_convert": ["lm_head"],
        }

    def fault(self, out_features: int, in_features: int) -> str:
        """Why a weight of this size cannot be quantised; empty where it can."""
        for size, of in ((out_features, "outputs"), (in_features, "inputs")):
            if size % self.block:
                return f"{size} {of} are no multiple of the block's {self.block}"
        return ""

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Last part of a tensor's name -> safetensors' name of its dtype, and its shape."""
        blocks = (out_features // self.block, in_features // self.block)
        return {"weight": ("F8_E4M3", (out_features, in_features)), "weight_scale_inv": ("F32", blocks)}

    def quantise(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of ``parts`` of some whole rows."""
        blocks = rows.float().unflatten(1, (-1, self.block)).unflatten(0, (-1, self.block))
        scale = _scale(blocks.abs().amax((1, 3)), _LARGEST_FP8)
        numbers = (blocks / scale[:, None, :, None]).clamp(-_LARGEST_FP8, _LARGEST_FP8)
        return {"weight": numbers.reshape(rows.shape).to(_FP8), "weight_scale_inv": scale}

    def dequantise(self, parts: dict[str, Tensor]) -> Tensor:
        """The rows, float32, that the tensors stand for."""
        scale = parts["weight_scale_inv"]
        wide = scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return parts["weight"].float() * wide


def _scale(largest: Tensor, levels: float) -> Tensor:
    """A scale above 0, also for numbers that are all 0, whose quotients are 0 then."""
    return (largest / levels).clamp(min=torch.finfo(torch.float32).tiny)


FORMATS = {"awq-int4": AwqInt4, "w8a8": W8A8, "fp8": BlockedFp8}
"""Name of a format -> its class."""
