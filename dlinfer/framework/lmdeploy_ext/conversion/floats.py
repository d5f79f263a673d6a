"""A checkpoint in floats that is quantised while it loads, as DLINFER_CPU_WEIGHTS asks.

It becomes what ``dlinfer quantise`` would have written of it, number for number: AWQ for int4, W8A8 for int8. Each
weight is packed as it is read, some rows after the other, so that of one weight at a time there is more than its packed
numbers.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import four_bits
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM, Plan
from dlinfer.framework.lmdeploy_ext.conversion.formats import ROWS, W8A8, AwqInt4, Format
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse
from dlinfer.ops.quantised.packing import AWQ

_DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
ADMITTED: Mapping[str, tuple[str, ...]] = {
    "int8": (*_DENSE, "MixtralForCausalLM"),  # LMDeploy's Qwen2-MoE and Qwen3-MoE have such experts in floats
    "int4": (*_DENSE, "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
}
"""Value of the setting -> the classes whose weights are packed: those of ``dlinfer quantise``, and with experts those
whose tokens were compared in the format."""

SETTING = "DLINFER_CPU_WEIGHTS"
_FLOATS = "floats"
_DTYPES = {"I8": torch.int8, "I32": torch.int32, "F16": torch.float16, "F32": torch.float32}

GROUP = 128
"""Inputs that share a scale in int4, or the largest number below that divides all sizes of a model."""

_PIECE = 1 << 18
"""Numbers that are packed at once, at most, or ``ROWS`` rows: what is computed of them takes 64 bits a number."""

_PACKED = re.compile(
    r"model\.layers\.\d+\.(?:self_attn\.[qkvo]_proj"
    r"|mlp\.(?:experts\.\d+\.|shared_expert\.)?(?:gate|up|down)_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123])\.weight"
)


def plan(bits: str, model: Mapping[str, Any]) -> Plan:
    """The plan of a model in floats. bits: int8 or int4. model: its whole configuration.

    Raises UnsupportedFeatureError for a class that is not admitted, and for sizes that int4 cannot pack.
    """
    setting = f"{SETTING}={bits}"
    names = model.get("architectures") or ["a model that names no architecture"]
    for name in names:
        if name not in ADMITTED[bits]:
            served = ", ".join(ADMITTED[bits])
            advice = f"unset it{_other(bits, name)}, or use another model"
            raise refuse(f"{setting} for {name} (served are {served})", advice)
    form = W8A8() if bits == "int8" else AwqInt4(_group(model))

    def convert(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
        if _PACKED.fullmatch(name) is None:
            yield name, tensor
            return
        owner = name.removesuffix("weight")
        for part, numbers in packed(setting, form, name, tensor).items():
            yield f"{owner}{part}", numbers

    return Plan({**form.config(), CONVERTED_FROM: f"{_FLOATS}, by {setting}"}, convert, packs=True)


def _other(bits: str, name: str) -> str:
    """The other value of the setting, where that serves a class, in words."""
    return next((f" or set {one}" for one in ADMITTED if one != bits and name in ADMITTED[one]), "")


def _group(model: Mapping[str, Any]) -> int:
    """The group size of int4. Raises UnsupportedFeatureError where no multiple of 8 divides all sizes."""
    given = four_bits.linear_sizes(model)
    group = math.gcd(GROUP, *given.values()) if given else 0
    if not group or group % AWQ.per_word:
        sizes = ", ".join(f"{name} = {size}" for name, size in given.items())
        what = f"{SETTING}=int4 for sizes that no multiple of {AWQ.per_word} divides ({sizes})"
        raise refuse(what, "set int8, which takes any size")
    return group


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` was made here."""
    return str(config.get(CONVERTED_FROM, "")).startswith(_FLOATS)


def packed(setting: str, form: Format, name: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a weight [out, in], in the format. setting: which asks for it, and its value.

    Raises UnsupportedFeatureError for a tensor that is no matrix of floats, is not finite, or outgrows the format.
    """
    what, unset = f"{setting} for {name}", "unset it, and load the checkpoint as it is"
    if weight.ndim != 2 or not weight.is_floating_point() or weight.dtype.itemsize == 1:
        raise refuse(f"{what}, of {weight.dtype} and shape {list(weight.shape)}", unset)
    if fault := form.fault(*weight.shape):
        raise refuse(f"{what}: {fault}", "set int8, which takes any size")
    made = {
        part: torch.empty(shape, dtype=_DTYPES[dtype])
        for part, (dtype, shape) in form.parts(*weight.shape).items()
    }
    step = max(_PIECE // max(weight.shape[1], 1) // ROWS, 1) * ROWS
    for first in range(0, weight.shape[0], step):
        rows = weight[first : first + step]
        if not rows.isfinite().all():
            raise refuse(f"{what}, which has numbers that are not finite", "use a checkpoint that is sound")
        for part, numbers in form.quantise(rows).items():
            if numbers.is_floating_point() and not numbers.isfinite().all():
                raise refuse(f"{what}, whose numbers are too large for its scales", "set int8")
            into, size = made[part], numbers.shape[form.joined]
            begin = first * into.shape[form.joined] // weight.shape[0]
            into.narrow(form.joined, begin, size).copy_(numbers)
    return made
