"""Tiny checkpoints of GPTQ and of compressed-tensors in 4 bits, each with its twin in floats, which is its oracle.

Numbers are rounded to the nearest, each alone: GPTQ's search changes which they are, not how they are stored.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.tiny_models import tokenizer
from examples.tiny_models.build import REFERENCE, STAMP, TEXT
from examples.tiny_models.families import COMMON, STOP_IDS
from tests.framework.lmdeploy_ext.conversion import conversion_files
from tests.framework.lmdeploy_ext.conversion.conversion_files import GPTQ, INT4, compressed, words

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "intermediate_size": 288}),
}


@dataclass(frozen=True)
class Method:
    """One format. group: inputs that share a scale, -1 for all. bias: what stored zero points of GPTQ lack. seed: of a
    model whose two best scores are never close on the tests' prompts."""

    config: dict[str, Any]
    dtype: torch.dtype
    group: int
    symmetric: bool
    bias: int = 0
    seed: int = 0


_CHANNEL = INT4 | {"strategy": "channel", "group_size": None, "symmetric": False}
METHODS = {
    "gptq": Method(GPTQ, torch.float16, 32, False, bias=1),
    "gptq_sym": Method(GPTQ | {"group_size": 128, "sym": True}, torch.float16, 128, True, bias=1),
    "gptq_v2": Method(GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}, torch.float16, -1, False),
    "w4a16": Method(compressed("pack-quantized", INT4), torch.bfloat16, 32, True),
    "w4a16_channel": Method(compressed("pack-quantized", _CHANNEL), torch.bfloat16, -1, False, seed=1),
}


def rounded(weight: Tensor, method: Method) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight [out, in] rounded to 4 bits: as float32 [out, in], and as a checkpoint has it."""
    out, into = weight.shape
    size = into if method.group == -1 else method.group
    group_of = torch.arange(into) // size
    parts = weight.double().split(size, dim=1)
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    span = torch.maximum(-low, high) / 7.5 if method.symmetric else (high - low) / 15
    scales = span.to(method.dtype)
    step = scales.double().clamp(min=1e-8)
    zeros = torch.full_like(step, 8) if method.symmetric else (-low / step).round().clamp(method.bias, 15)
    numbers = (weight.double() / step[:, group_of] + zeros[:, group_of]).round().clamp(0, 15)
    again = (numbers - zeros[:, group_of]) * scales.double()[:, group_of]
    if method.config["quant_method"] == "gptq":
        tensors = {
            "qweight": words(numbers.t(), 0),
            "qzeros": words(zeros.t() - method.bias, 1),
            "scales": scales.t().contiguous(),
            "g_idx": group_of.int(),
        }
    else:
        shape = torch.tensor([out, into])
        tensors = {"weight_packed": words(numbers, 1), "weight_scale": scales, "weight_shape": shape}
        if not method.symmetric:
            tensors["weight_zero_point"] = words(zeros, 0)
    return again.float(), tensors


def build(family: str, name: str, folder: Path, **sizes: int) -> None:
    """Make ``folder`` a checkpoint of a family by one of METHODS, in two files, and ``REFERENCE`` in it its twin.

    sizes: values in its config.json that differ from the family's.
    """
    import transformers

    method, (prefix, extra) = METHODS[name], FAMILIES[family]
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    torch.manual_seed(method.seed)
    model = model_class(model_class.config_class(**COMMON | extra | sizes)).float().eval()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn_like(parameter) * 0.2
                parameter.copy_(noise if key.endswith("bias") else 1 + noise)
            parameter.copy_(parameter.to(method.dtype).float())
    for key, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data, parts = rounded(module.weight.data, method)
            tensors |= {f"model.{key}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            if module.bias is None and name == "gptq":  # as early tools have it
                tensors[f"model.{key}.bias"] = torch.zeros(module.out_features, dtype=method.dtype)
    model.generation_config.eos_token_id = STOP_IDS
    model.save_pretrained(folder / REFERENCE)
    tokens = tokenizer.train()
    tokens.save_pretrained(folder / REFERENCE)
    tokens.save_pretrained(folder)
    packed = {key.rpartition(".")[0] + ".weight" for key in tensors}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for key, tensor in model.state_dict().items():
        if key not in packed | tied:
            tensors[key] = tensor.to(method.dtype).contiguous()
    save(tensors, folder)
    dtype = str(method.dtype).removeprefix("torch.")
    config = model.config.to_dict() | {"dtype": dtype, "quantization_config": method.config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model.generation_config.save_pretrained(folder)
    sources = [Path(file).read_text() for file in (__file__, conversion_files.__file__)]
    made = hashlib.sha256("".join(sources).encode()).hexdigest()[:16]
    (folder / STAMP).write_text(json.dumps({"fingerprint": f"{family}-{name}-{made}"}) + "\n")


def build_mxfp4(folder: Path, seed: int = 0) -> None:
    """Make ``folder`` a gpt-oss whose experts are in MXFP4, in two files, and ``REFERENCE`` in it its twin."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.GptOssConfig(**COMMON | TEXT["gpt_oss"].config)
    model = transformers.GptOssForCausalLM(config).bfloat16().float().eval()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                numbers, blocks, scales = conversion_files.mxfp4(parameter.transpose(1, 2))
                parameter.copy_(numbers.transpose(1, 2))
                tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            else:
                if parameter.ndim == 1:
                    noise = torch.randn_like(parameter) * 0.2
                    parameter.copy_((noise if "bias" in key else 1 + noise).bfloat16())
                tensors[key] = parameter.bfloat16().contiguous()
    model.generation_config.eos_token_id = STOP_IDS
    model.save_pretrained(folder / REFERENCE)
    tokens = tokenizer.train()
    tokens.save_pretrained(folder / REFERENCE)
    tokens.save_pretrained(folder)
    save(tensors, folder)
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    whole = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(
        json.dumps(whole | {"quantization_config": quantised}, indent=2) + "\n"
    )
    model.generation_config.save_pretrained(folder)
    sources = [Path(file).read_text() for file in (__file__, conversion_files.__file__)]
    made = hashlib.sha256("".join(sources).encode()).hexdigest()[:16]
    (folder / STAMP).write_text(json.dumps({"fingerprint": f"mxfp4-{seed}-{made}"}) + "\n")


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """In two files, every other tensor in the first: the parts of a layer are in both."""
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({key: tensors[key] for key in chosen}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
