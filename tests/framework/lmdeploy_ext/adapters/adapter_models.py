"""A model of two layers as LMDeploy builds it, and adapters of it as PEFT saves them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.devices import DeviceContext, get_device_manager
from lmdeploy.pytorch.nn.linear import build_gateup_linear, build_o_proj
from safetensors.torch import save_file
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.adapters import layers
from dlinfer.framework.lmdeploy_ext.checks.model.adapters import LoraModule, lora_modules

SIZES = {"gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8)}


class LlamaForCausalLM(nn.Module):
    """As LMDeploy's: a class that is served, with gate and up merged."""

    packed_modules_mapping: ClassVar = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self) -> None:
        super().__init__()
        PytorchEngineConfig(device_type="cpu")
        self.ctx_mgr = SimpleNamespace(build_ctx=SimpleNamespace(enable_deterministic=False))
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        options: dict[str, Any] = {"bias": False, "is_tp": False}
        for layer in self.model.layers:
            mlp: Any = nn.Module()
            mlp.gate_up_proj = build_gateup_linear(8, [6, 6], **options)
            mlp.down_proj = build_o_proj(6, 8, **options)
            layer.mlp = mlp


def save(folder: Path, seed: int, ranks: dict[str, int], **config: Any) -> str:
    """Save an adapter with random weights. ranks: end of a module's path -> rank; the first is the configured one.

    With ``use_dora`` among the options it has magnitudes, too.
    """
    folder.mkdir()
    names = list(ranks)
    plain = {"peft_type": "LORA", "r": ranks[names[0]], "lora_alpha": 6, "target_modules": names}
    plain["rank_pattern"] = {name: ranks[name] for name in names[1:]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    tensors: dict[str, Tensor] = {}
    draws = torch.Generator().manual_seed(seed)
    for path, module in sorted(modules(LlamaForCausalLM()).items()):
        for name in names:
            if path.endswith(f".{name}"):
                inputs, outputs = module.sizes()
                key = f"base_model.model.{path}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(ranks[name], inputs, generator=draws)
                tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, ranks[name], generator=draws)
                if config.get("use_dora"):
                    tensors[f"{key}.lora_magnitude_vector"] = 1 + torch.rand(outputs, generator=draws)
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def modules(model: nn.Module) -> dict[str, LoraModule]:
    return lora_modules(model)


def added(model: nn.Module, number: int) -> dict[str, Tensor]:
    """What adapter ``number`` adds to the weight of each module, float64 [out, in]; nothing where it has rank 0."""
    products: dict[str, Tensor] = {}
    for path, module in modules(model).items():
        name = path.rpartition(".")[2]
        if name not in module.linear.lora_adapters:
            continue
        lora = module.linear.lora_adapters[name]
        info = lora.adapter_info
        start, rank = int(info.rank_offsets[number]), int(info.ranks[number])
        if rank:
            a, b = (weight[start : start + rank].double() for weight in (lora.lora_A, lora.lora_B))
            products[path] = float(info.scalings[number]) * b.T @ a
    return products


def wanted(folder: str, scaling: dict[str, float]) -> dict[str, Tensor]:
    """What the adapter in a folder adds, from its file. scaling: name of a module -> its scaling."""
    from safetensors.torch import load_file

    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    products: dict[str, Tensor] = {}
    for key, a in tensors.items():
        if key.endswith("lora_A.weight"):
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")]
            products[path] = scaling[path.rpartition(".")[2]] * b.double() @ a.double()
    return products


def check(model: nn.Module, number: int, folder: str, scaling: dict[str, float]) -> None:
    """Compare what an adapter adds with its file."""
    torch.testing.assert_close(added(model, number), wanted(folder, scaling), rtol=1e-6, atol=1e-6)


def build(adapters: dict[str, str]) -> LlamaForCausalLM:
    """A model with the adapters, in float32."""
    model = LlamaForCausalLM()
    draws = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=draws)

    def theirs(*_: Any) -> None:
        raise AssertionError("LMDeploy's own")

    add: Any = layers.add_adapters.build(theirs)
    with get_device_manager().context(DeviceContext("cpu")):
        add(model, adapters, torch.float32, torch.device("cpu"))
    return model
