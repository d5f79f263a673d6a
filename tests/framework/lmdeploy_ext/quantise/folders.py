"""Folders as Hugging Face saves a tiny dense decoder, written tensor by tensor: no model is built."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WORDS = 256, 384, 4, 2, 64, 2, 40

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SIZES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """All weights: projections, and what is to be kept as it is."""
    torch.manual_seed(0)
    found = {
        "model.embed_tokens.weight": torch.randn(WORDS, HIDDEN),
        "lm_head.weight": torch.randn(WORDS, HIDDEN),
        "model.norm.weight": torch.randn(HIDDEN),
    }
    for layer in range(LAYERS):
        for name, size in SIZES.items():
            found[f"model.layers.{layer}.{name}.weight"] = torch.randn(size) * 0.1
        found[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(HEADS * HEAD_DIM)
        found[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(HIDDEN)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def write(
    folder: Path, weights: dict[str, Tensor] | None = None, shards: int = 1, **config: Any
) -> dict[str, Tensor]:
    """Write a folder and give its weights. config: in place of CONFIG's."""
    folder.mkdir()
    weights = tensors() if weights is None else weights
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "consolidated.safetensors").write_bytes(b"another form of the weights")
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return weights
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = dict(list(weights.items())[number::shards])
        save_file(mine, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, name)
    total = sum(one.nbytes for one in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights
