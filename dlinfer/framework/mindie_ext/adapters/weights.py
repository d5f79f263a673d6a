"""Read a LoRA adapter from the files that PEFT saves: adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlinfer.framework.mindie_ext.errors import AdapterError

_NAME = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")

# Key of adapter_config.json -> values that need nothing beyond plain LoRA of linear layers.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}


@dataclass(frozen=True)
class LoraWeights:
    """An adapter's weights for one linear layer. The adapter adds ``scaling * b @ a`` to the layer's weight.

    a: [rank, inputs]. b: [outputs, rank].
    """

    a: Tensor
    b: Tensor
    scaling: float


def read_adapter(name: str, path: str) -> dict[str, LoraWeights]:
    """Read the adapter ``name`` in the folder ``path``. Return module path -> weights. Raises AdapterError."""
    folder = Path(path)
    config = _read_config(name, folder)
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise _fault(
                name, f"{key} = {config[key]!r} is not supported", "use a plain LoRA adapter of linear layers"
            )
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _read_tensors(name, folder).items():
        match = _NAME.match(key)
        if match is None:
            raise _fault(
                name, f"the tensor {key!r} is not a LoRA weight of a linear layer", "use a plain LoRA adapter"
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise _fault(name, "it has no tensors", "save it with PEFT's save_pretrained")
    weights: dict[str, LoraWeights] = {}
    for module, both in sides.items():
        if both.keys() != {"A", "B"}:
            raise _fault(name, f"{module} has only one of lora_A and lora_B", "save it again")
        a, b = both["A"], both["B"]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise _fault(
                name, f"{module} has A and B of sizes {shapes}, which do not fit together", "save it again"
            )
        weights[module] = LoraWeights(a, b, _scaling(config, module, a.shape[0]))
    return weights


def _scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (Kalajdzievski, 2023, arXiv:2312.03732)."""
    alpha = config.get("lora_alpha") or rank
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    advice = "give the folder that PEFT's save_pretrained wrote"
    if not file.is_file():
        raise _fault(name, f"there is no {file}", advice)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _fault(name, f"{file} is not JSON: {error}", advice) from error
    if not isinstance(config, dict):
        raise _fault(name, f"{file} is not a JSON object", advice)
    return config


def _read_tensors(name: str, folder: Path) -> dict[str, Tensor]:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise _fault(name, f"there is no {file}", "save it with safe_serialization=True")
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise _fault(name, f"{file} is corrupt: {error}", "copy it again") from error


def _fault(name: str, detail: str, advice: str) -> AdapterError:
    return AdapterError(name=name, detail=detail, advice=advice)
