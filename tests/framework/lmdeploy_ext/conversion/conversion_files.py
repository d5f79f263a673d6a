"""Linear layers as GPTQ's and compressed-tensors' files have them, and what they mean in floats: written by hand.

Nothing here knows dlinfer's packing: numbers go to words and back by loops over the eight places of a word.
"""

from typing import Any

import torch
from torch import Tensor

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


def compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    } | more


INT4 = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
}
KIMI_K25 = compressed(
    "pack-quantized",
    INT4,
    ignore=[
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
)
"""As Kimi-K2.5's published checkpoints have it: the experts alone are packed."""
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
STATIC = {"strategy": "tensor", "dynamic": False}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
OF_BLOCKS = {"strategy": "group", "group_size": 128, "dynamic": True}
PACKED = compressed("pack-quantized", INT4)


def words(numbers: Tensor, dim: int) -> Tensor:
    """int32 words of eight neighbours along ``dim`` each, the first in the lowest bits; 0 fills the last."""
    numbers = numbers.movedim(dim, 0).long()
    size = numbers.shape[0]
    numbers = torch.cat([numbers, torch.zeros(-size % 8, *numbers.shape[1:], dtype=torch.long)])
    made = sum(numbers[place::8] << (4 * place) for place in range(8))
    assert isinstance(made, Tensor)
    return torch.where(made < 2**31, made, made - 2**32).int().movedim(0, dim).contiguous()


def gptq(
    name: str, into: int, out: int, group: int, bias: int = 1, **more: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a GPTQ layer, and its weight [in, out] in float64. bias: what stored zero points lack."""
    size = into if group == -1 else group
    group_of = torch.arange(into) // size
    groups = int(group_of[-1]) + 1
    numbers, zeros = torch.randint(16, (into, out)), torch.randint(bias, 16, (groups, out))
    scales = (torch.rand(groups, out) + 0.1).half()
    parts = {
        "qweight": words(numbers, 0),
        "qzeros": words(zeros - bias, 1),
        "scales": scales,
        "g_idx": group_of.int(),
    }
    meant = (numbers - zeros[group_of]) * scales.double()[group_of]
    return {f"{name}.{part}": tensor for part, tensor in (parts | more).items()}, meant


def packed(
    name: str, into: int, out: int, group: int, symmetric: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a ``pack-quantized`` layer, and its weight [in, out] in float64."""
    size = into if group == -1 else group
    group_of = torch.arange(into) // size
    groups = int(group_of[-1]) + 1
    numbers, zeros = torch.randint(-8, 8, (out, into)), torch.randint(-8, 8, (out, groups))
    scales = (torch.rand(out, groups) + 0.1).bfloat16()
    parts = {
        "weight_packed": words(numbers + 8, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, into]),
    }
    if symmetric:
        zeros = torch.zeros_like(zeros)
    else:
        parts["weight_zero_point"] = words(zeros + 8, 0)
    meant = (numbers - zeros[:, group_of]) * scales.double()[:, group_of]
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, meant.t()


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [experts, out, in] rounded to MXFP4: (the numbers in float32, blocks, scales)."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = groups / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - steps).abs().argmin(-1)
    numbers = steps[nearest].copysign(scaled) * exponents.exp2()[..., None]
    codes = (nearest + 8 * scaled.signbit()).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return numbers.flatten(-2), blocks, (exponents + 127).to(torch.uint8)
