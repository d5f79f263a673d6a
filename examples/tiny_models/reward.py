"""Reward models: a checkpoint whose head gives one number a token, made from a language model of the same layers.

The oracle of the hidden states is transformers' language model; what the head makes of them is two lines of algebra.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import internlm2

FILE = "model.safetensors"


def save_qwen2(model: Any, folder: Path) -> None:
    """Write the ``Qwen2ForRewardModel`` twin of a ``Qwen2ForCausalLM``: ``score`` is linear, relu, linear to one."""
    model.save_pretrained(folder)
    size, dtype = model.config.hidden_size, model.dtype
    head = {
        "score.0.weight": torch.randn(size, size) * size**-0.5,
        "score.0.bias": torch.randn(size),
        "score.2.weight": torch.randn(1, size) * size**-0.5,
        "score.2.bias": torch.randn(1),
    }
    _write(folder, load_file(folder / FILE) | {name: one.to(dtype) for name, one in head.items()}, "Qwen2")


def save_internlm2(model: Any, folder: Path) -> None:
    """Write the ``InternLM2ForRewardModel`` twin of a ``LlamaForCausalLM``: ``v_head`` is linear to one."""
    internlm2.save(model, folder)
    weights = load_file(folder / FILE)
    weights["v_head.weight"] = torch.randn_like(weights.pop("output.weight")[:1])
    _write(folder, weights, "InternLM2")


def _write(folder: Path, weights: dict[str, torch.Tensor], name: str) -> None:
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [f"{name}ForRewardModel"]}
    file.write_text(json.dumps(config, indent=2) + "\n")
