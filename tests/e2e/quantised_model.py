"""Tiny quantised checkpoints, and what their layers mean, in plain torch: nothing here knows LMDeploy or dlinfer.

A checkpoint is made of a random model: the weights of its projections become 8-bit numbers and scales, under the names
that LMDeploy's checkpoints have. ``Simulated`` is such a layer on floats; the oracle's model is made of these.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.tiny_models import tokenizer
from examples.tiny_models.families import COMMON, STOP_IDS
from tests.framework.lmdeploy_ext.conversion.conversion_files import (
    BLOCKS,
    FP8_INPUTS,
    INT8,
    INT8_INPUTS,
    OF_BLOCKS,
    STATIC,
    compressed,
)
from tests.framework.lmdeploy_ext.conversion.conversion_files import FP8 as FLOAT8

FP8, BLOCK = torch.float8_e4m3fn, 128

# Sizes of whole blocks: LMDeploy joins q, k and v, and gate and up, and with them their blocks.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.15}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}

METHODS: dict[str, dict[str, Any]] = {
    "int8": {"quant_method": "smooth_quant", "quant_dtype": "int8"},
    "float8": {"quant_method": "smooth_quant", "quant_dtype": "float8_e4m3fn"},
    "blocked": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "ue8m0": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "static": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static"},
}
COMPRESSED = {
    "int8": ("int-quantized", INT8, INT8_INPUTS, {"scale": "weight_scale"}),
    "float8": ("float-quantized", FLOAT8, FP8_INPUTS, {"scale": "weight_scale"}),
    "blocked": (
        "float-quantized",
        FLOAT8 | BLOCKS,
        FP8_INPUTS | OF_BLOCKS,
        {"weight_scale_inv": "weight_scale"},
    ),
    "static": ("float-quantized", FLOAT8 | STATIC, FP8_INPUTS | STATIC, {}),
}
"""Of a method, how compressed-tensors has it: the format, weights, inputs, and what it calls the tensors otherwise."""
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 32},
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
}


def build(family: str, method: str, folder: Path, is_compressed: bool = False, **sizes: int) -> None:
    """Make ``folder`` a checkpoint of a family that is quantised by one of METHODS, as compressed-tensors has it or as
    LMDeploy reads it. sizes: values in its config.json that differ from the family's."""
    import transformers
    from safetensors.torch import load_file, save_file

    name, extra = CONFIGS[family]
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(len(family))
    model = model_class(model_class.config_class(**COMMON | SIZES | extra | sizes)).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn_like(parameter) * 0.2
                parameter.copy_(noise if parameter_name.endswith("bias") else 1 + noise)
    model.generation_config.eos_token_id = STOP_IDS
    model.save_pretrained(folder)
    tokenizer.train().save_pretrained(folder)

    stored: dict[str, Tensor] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        layer, _, kind = key.rpartition(".")
        is_quantised = kind == "weight" and layer.endswith(("_proj", ".w1", ".w2", ".w3"))
        stored |= quantised(layer, tensor, method) if is_quantised else {key: tensor}
    quantisation = METHODS[method]
    if is_compressed:
        layout, weights, inputs, names = COMPRESSED[method]
        quantisation = compressed(layout, weights, inputs)
        stored = {_renamed(key, names): tensor for key, tensor in stored.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))


def _renamed(key: str, names: dict[str, str]) -> str:
    """The name of a tensor whose last part is called otherwise."""
    layer, _, kind = key.rpartition(".")
    return f"{layer}.{names.get(kind, kind)}"


def quantised(layer: str, weight: Tensor, method: str) -> dict[str, Tensor]:
    """The tensors of one linear layer as a checkpoint has them."""
    if method in ("int8", "float8"):
        dtype, largest = (torch.int8, 127) if method == "int8" else (FP8, 448)
        scale = weight.abs().amax(1, keepdim=True) / largest
        numbers = weight / scale
        numbers = numbers.round() if method == "int8" else numbers
        return {f"{layer}.weight": numbers.clamp(-largest, largest).to(dtype), f"{layer}.scale": scale}
    if method == "static":
        scale = weight.abs().max() / 448
        expert = [int(part) for part in layer.split(".") if part.isdigit()][-1]
        fixed = (0.3 if layer.endswith(("down_proj", "w2")) else 0.02) * (1 + expert / 8)
        tensors = {"weight": (weight / scale).clamp(-448, 448).to(FP8), "weight_scale": scale}
        return {f"{layer}.{kind}": tensor for kind, tensor in tensors.items()} | {
            f"{layer}.input_scale": torch.tensor(fixed)
        }
    rows, columns = weight.shape
    square = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = square.abs().amax((1, 3)) / 448
    if method == "ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    numbers = (square / scale[:, None, :, None]).clamp(-448, 448).view(rows, columns).to(FP8)
    return {f"{layer}.weight": numbers, f"{layer}.weight_scale_inv": scale}


class Simulated(torch.nn.Module):
    """A quantised linear layer in float32: weight and input are rounded to the values that 8 bits can hold."""

    def __init__(self, method: str, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.method, self.bias = method, tensors.get("bias")
        weight = tensors["weight"].float()
        if method in ("int8", "float8"):
            self.weight = weight * tensors["scale"]
        elif method == "static":
            self.weight, self.input_scale = weight * tensors["weight_scale"], tensors["input_scale"]
        else:
            scale = tensors["weight_scale_inv"]
            self.weight = weight * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    def kept(self, x: Tensor) -> Tensor:
        """What of an input 8 bits keep."""
        if self.method == "int8":
            scale = x.abs().amax(-1, keepdim=True) / 127
            times = x / scale
            return torch.sign(times) * torch.floor(times.abs() + 0.5) * scale
        if self.method == "float8":
            scale = x.abs().amax(-1, keepdim=True) / 448
            return (x / scale).to(FP8).float() * scale
        if self.method == "static":
            return (x / self.input_scale).clamp(-448, 448).to(FP8).float() * self.input_scale
        blocks = x.unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True) / 448
        if self.method == "ue8m0":
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return ((blocks / scale).to(FP8).float() * scale).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.kept(x), self.weight, self.bias)


class SimulatedExperts(torch.nn.Module):
    """transformers' experts, each with three simulated layers."""

    def __init__(self, experts: list[dict[str, Simulated]]) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for number, layers in enumerate(self.experts):
            token, choice = torch.where(top_k_index == number)
            if not len(token):
                continue
            x = hidden_states[token]
            inner = torch.nn.functional.silu(layers["gate"](x)) * layers["up"](x)
            out.index_add_(0, token, layers["down"](inner) * top_k_weights[token, choice, None])
        return out


def simulated_model(folder: Path, method: str) -> Any:
    """transformers' model of a quantised checkpoint, with simulated layers, in float32."""
    import transformers
    from safetensors.torch import load_file

    config = transformers.AutoConfig.from_pretrained(folder)
    others: dict[str, str] = {}
    if config.quantization_config["quant_method"] == "compressed-tensors":
        others = {theirs: ours for ours, theirs in COMPRESSED[method][-1].items()}
    delattr(config, "quantization_config")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        name = functools.reduce(lambda name, pair: name.replace(*pair), names.items(), key)
        layer, _, kind = _renamed(name, others).rpartition(".")
        layers.setdefault(layer, {})[kind] = tensor

    plain: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Simulated]]] = {}
    for layer, tensors in layers.items():
        if len(tensors.keys() - {"bias"}) == 1:  # a weight alone
            plain |= {f"{layer}.{kind}": tensor for kind, tensor in tensors.items()}
        elif ".experts." in layer:
            parent, _, rest = layer.partition(".experts.")
            number, _, projection = rest.partition(".")
            mine = experts.setdefault(f"{parent}.experts", {}).setdefault(int(number), {})
            made = mine[projection.removesuffix("_proj")] = Simulated(method, tensors)
            if method == "ue8m0" and projection == "down_proj":
                made.method = "blocked"  # LMDeploy scales what is between the two products by any number
        else:
            model.set_submodule(layer, Simulated(method, tensors))
    for name, numbered in experts.items():
        model.set_submodule(name, SimulatedExperts([numbered[i] for i in range(len(numbered))]))
    missing, unexpected = model.load_state_dict(plain, strict=False)
    assert not unexpected, unexpected
    assert all("experts" in name or "inv_freq" in name for name in missing), missing
    return model
