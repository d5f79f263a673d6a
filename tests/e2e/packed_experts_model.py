"""Tiny checkpoints of mixtures of experts in 4 bits, each with its twin in floats, which is its oracle.

transformers writes the twin, expert by expert; its tensors are rounded, and a copy of the folder gets the packed ones.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.tiny_models import awq, tokenizer
from examples.tiny_models.build import REFERENCE, STAMP
from examples.tiny_models.families import FAMILIES, STOP_IDS
from tests.e2e import packed_model
from tests.e2e.packed_model import Method
from tests.framework.lmdeploy_ext.conversion import conversion_files
from tests.framework.lmdeploy_ext.conversion.conversion_files import INT4, compressed

_ROUTERS = ["lm_head", "re:.*gate$"]
_AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": awq.GROUP_SIZE,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["gate"],
}
METHODS = {
    "awq": Method(_AWQ, torch.float16, awq.GROUP_SIZE, False),
    "gptq": packed_model.METHODS["gptq"],
    "gptq_sym": replace(packed_model.METHODS["gptq_sym"], group=64),
    "w4a16": packed_model.METHODS["w4a16"],
    "w4a16_channel": packed_model.METHODS["w4a16_channel"],
    "experts": Method(
        compressed("pack-quantized", INT4, ignore=[*_ROUTERS, "re:.*self_attn.*"]), torch.bfloat16, 32, True
    ),
}
"""``experts``: compressed-tensors of experts alone, with attention in floats."""


_SEEDS = {"mixtral": 3}
"""Of models whose two best scores are never close on the tests' prompts, where a method's own seed is none."""


def _config(name: str) -> dict[str, Any]:
    config, method = METHODS[name].config, METHODS[name].config["quant_method"]
    if method == "gptq":
        return config | {"group_size": METHODS[name].group, "dynamic": {"-:.*gate$": {}}}
    return config | {"ignore": _ROUTERS} if name.startswith("w4a16") else config


def _is_packed(layer: str, name: str) -> bool:
    is_linear = layer.endswith(("_proj", ".w1", ".w2", ".w3"))
    return is_linear and (name != "experts" or ".experts." in layer)


def build(family: str, name: str, folder: Path, **sizes: int) -> None:
    """Make ``folder`` a checkpoint of a family of experts by one of METHODS, and ``REFERENCE`` in it its twin.

    sizes: values in its config.json that differ from the family's.
    """
    import transformers

    method, spec, twin = METHODS[name], FAMILIES[family], folder / REFERENCE
    model_class = getattr(transformers, f"{spec.hf_name}ForCausalLM")
    torch.manual_seed(_SEEDS.get(family, method.seed))
    model = model_class(model_class.config_class(**spec.config | sizes)).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn_like(parameter) * 0.2
                parameter.copy_(noise if key.endswith("bias") else 1 + noise)
    model.generation_config.eos_token_id = STOP_IDS
    model.save_pretrained(twin)
    tokenizer.train().save_pretrained(twin)

    floats: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for key, tensor in load_file(twin / "model.safetensors").items():
        layer, _, part = key.rpartition(".")
        if part == "weight" and _is_packed(layer, name):
            given = tensor.to(method.dtype).float()
            rounded = (
                awq.rounded(given, method.group) if name == "awq" else packed_model.rounded(given, method)
            )
            floats[key], parts = rounded
            stored |= {f"{layer}.{kind}": one.contiguous() for kind, one in parts.items()}
        else:
            stored[key] = tensor.to(method.dtype)
            floats[key] = stored[key].float()
    save_file(floats, twin / "model.safetensors", {"format": "pt"})
    for path in twin.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    packed_model.save(stored, folder)
    config = json.loads((twin / "config.json").read_text())
    config |= {"dtype": str(method.dtype).removeprefix("torch."), "quantization_config": _config(name)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    files = (__file__, packed_model.__file__, conversion_files.__file__, awq.__file__)
    made = hashlib.sha256("".join(Path(file).read_text() for file in files).encode()).hexdigest()[:16]
    (folder / STAMP).write_text(json.dumps({"fingerprint": f"{family}-{name}-{made}"}) + "\n")
