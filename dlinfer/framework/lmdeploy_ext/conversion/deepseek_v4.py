"""Convert DeepSeek-V4's released checkpoints: FP8 in blocks becomes floats, and experts in FP4 stay as they are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan
from dlinfer.framework.lmdeploy_ext.device.activation import refuse

MODEL = "deepseek_v4"
BLOCK = 128
MXFP4 = "mxfp4"
"""The format of experts in FP4: E2M1 numbers, with a scale in E8M0 for each 32 inputs (OCP Microscaling 1.0)."""


def plan(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """Return the plan for a checkpoint as DeepSeek released it. Raises UnsupportedFeatureError for other variants.

    Each weight in FP8 has a scale for each block of 128 x 128 numbers: ``<layer>.weight``, float8_e4m3fn [out, in], and
    ``<layer>.scale``. Their product needs four bits of mantissa, so it is exact in bfloat16. With ``expert_dtype`` of
    "fp4", routed experts have ``weight``, int8 [out, in / 2], two numbers in a byte, the first in the lower half, and
    ``scale`` [out, in / 32]; our layer takes them unchanged. Other weights have 16 bits or more.

    config: the checkpoint's ``quantization_config``. model: the contents of config.json.
    """
    checkpoint = Checkpoint("fp8", config, model)
    fmt, block = config.get("fmt", "e4m3"), list(config.get("weight_block_size") or [])
    checkpoint.require(fmt == "e4m3", f"with fmt {fmt}")
    checkpoint.require(block == [BLOCK, BLOCK], f"with weight_block_size {block or None}")
    experts = config.get("expert_dtype") or model.get("expert_dtype")
    checkpoint.require(experts in (None, "fp4", "fp8"), f"with expert_dtype {experts!r}")
    is_packed = experts == "fp4"
    waiting: dict[str, Tensor] = {}

    def convert(name: str, tensor: Tensor, layer: Any) -> list[tuple[str, Tensor]]:
        path, _, kind = name.rpartition(".")
        is_stored = kind == "scale" or (kind == "weight" and tensor.dtype is torch.float8_e4m3fn)
        if not is_stored or (is_packed and ".ffn.experts." in name):
            return [(name, tensor)]
        other = waiting.pop(f"{path}.{'weight' if kind == 'scale' else 'scale'}", None)
        if other is None:
            waiting[name] = tensor
            return []
        weight, scale = (other, tensor) if kind == "scale" else (tensor, other)
        return [(f"{path}.weight", dequantised(path, weight, scale))]

    return Plan(None, convert, experts=MXFP4 if is_packed else "floats")


def dequantised(path: str, weight: Tensor, scale: Tensor) -> Tensor:
    """Return a weight in FP8 [out, in] times the scales of its blocks, float32.

    path: the layer's name. Raises UnsupportedFeatureError for scales of another shape.
    """
    blocks = [-(-size // BLOCK) for size in weight.shape]
    if list(scale.shape) != blocks:
        what = f"{path} in FP8 with scales of shape {list(scale.shape)} instead of {blocks}"
        raise refuse(what, "use a checkpoint with blocks of 128 x 128 numbers")
    rows, columns = weight.shape
    scales = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * scales
