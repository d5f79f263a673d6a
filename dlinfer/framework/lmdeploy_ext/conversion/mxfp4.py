"""MXFP4 checkpoints of gpt-oss: experts in 4-bit floats, which are widened while weights load.

OCP Microscaling Formats specification 1.0, as gpt-oss stores it. Of each projection of the experts: ``..._blocks``
uint8 [experts, out, in / 32, 16], two numbers E2M1 in a byte, the first in the lower half; ``..._scales`` uint8
[experts, out, in / 32], powers of two by E8M0. Every number is a bfloat16 exactly, unless it lies beyond that.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_POSITIVE, *(-one for one in _POSITIVE)], dtype=torch.bfloat16)
_BIAS = 127
_PARTS = ("_blocks", "_scales")


def plan(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """The plan of a gpt-oss checkpoint, which becomes an unquantised one. Raises UnsupportedFeatureError."""
    checkpoint = Checkpoint("mxfp4", config, model)
    checkpoint.require(model.get("model_type") == "gpt_oss", "in another model than gpt-oss")
    waiting: dict[str, Tensor] = {}
    told: list[bool] = []

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        found = next((part for part in _PARTS if name.endswith(part)), None)
        if found is None:
            yield name, tensor
            return
        if not told:
            told.append(True)
            warnings.warn(
                "experts in MXFP4 are widened to 16 bits as they load, and take four times the memory of the files",
                stacklevel=2,
            )
        owner = name.removesuffix(found)
        other = waiting.pop(owner + next(part for part in _PARTS if part != found), None)
        if other is None:
            waiting[name] = tensor
        else:
            blocks, scales = (tensor, other) if found == "_blocks" else (other, tensor)
            yield owner, widened(blocks, scales).transpose(1, 2)

    return Plan(None, convert)


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [experts, out, in] of blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32], uint8.

    A scale of 255 gives NaN, and a number beyond bfloat16 infinity.
    """
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - _BIAS).to(torch.bfloat16)
    powers[255] = torch.nan
    out = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)
    for made, block, scale in zip(
        out, blocks, scales, strict=True
    ):  # of one expert at a time, indices are wide
        factor = powers[scale.int()][..., None]
        torch.mul(_NUMBERS[(block & 15).int()], factor, out=made[..., 0])
        torch.mul(_NUMBERS[(block >> 4).int()], factor, out=made[..., 1])
    return out.flatten(2)
