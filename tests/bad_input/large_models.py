"""Model folders that do not fit this machine: whole configurations, and weight files that are one hole each.

A header tells names, dtypes and shapes; the bytes after it are a hole that ``truncate`` makes, so that nothing is
written. Sizes follow the machine's memory: weights of half as much again, in layers that each are a small part of it.
"""

import json
import math
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from examples.tiny_models.build import build

LAYERS = 40
HEADS = 16
VOCABULARY = 512
EXPERTS = 8
GROUP = 128
BYTES = {"BF16": 2, "F16": 2, "I32": 4}

Tensors = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Large:
    """A folder. weights: bytes that LMDeploy's parameters take, of which not one is on the disk."""

    folder: Path
    weights: int


def _hidden(elements: int, size: float) -> int:
    """Width at which weights take half as much again as the memory.

    A layer has ``elements`` times its square, of ``size`` bytes each.
    """
    wanted = 1.5 * psutil.virtual_memory().total
    return math.ceil(math.sqrt(wanted / (LAYERS * elements * size)) / 512) * 512


def _linears(hidden: int, layer: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers of a Llama whose MLP is twice as wide as the model: 10 hidden^2."""
    sizes = {f"self_attn.{one}_proj": (hidden, hidden) for one in "qkvo"}
    sizes |= {f"mlp.{one}_proj": (2 * hidden, hidden) for one in ("gate", "up")}
    sizes |= {"mlp.down_proj": (hidden, 2 * hidden)}
    return {f"model.layers.{layer}.{name}": size for name, size in sizes.items()}


def _around(hidden: int, dtype: str) -> Tensors:
    """Embedding, output projection and norms."""
    norms = [
        f"model.layers.{n}.{one}_layernorm" for n in range(LAYERS) for one in ("input", "post_attention")
    ]
    table = {f"{name}.weight": (dtype, (hidden,)) for name in (*norms, "model.norm")}
    return table | {
        f"{name}.weight": (dtype, (VOCABULARY, hidden)) for name in ("model.embed_tokens", "lm_head")
    }


def _config(hidden: int, **changed: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changed


def dense(folder: Path) -> Large:
    """A Llama in bfloat16."""
    hidden = _hidden(10, 2)
    tensors = _around(hidden, "BF16")
    for layer in range(LAYERS):
        tensors |= {f"{name}.weight": ("BF16", size) for name, size in _linears(hidden, layer).items()}
    return _write(folder, _config(hidden), tensors)


def awq(folder: Path) -> Large:
    """A Llama of 4 bits: what does not fit is its packed weights."""
    hidden = _hidden(10, 0.5)
    tensors = _around(hidden, "F16")
    for layer in range(LAYERS):
        for name, (rows, columns) in _linears(hidden, layer).items():
            tensors[f"{name}.qweight"] = ("I32", (columns, rows // 8))
            tensors[f"{name}.qzeros"] = ("I32", (columns // GROUP, rows // 8))
            tensors[f"{name}.scales"] = ("F16", (columns // GROUP, rows))
    packing = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return _write(folder, _config(hidden, dtype="float16", quantization_config=packing), tensors)


def mixture(folder: Path) -> Large:
    """A Mixtral in bfloat16: what does not fit is mostly experts."""
    hidden = _hidden(4 + 3 * EXPERTS, 2)
    tensors = _around(hidden, "BF16")
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.block_sparse_moe"
        tensors |= {
            f"{name}.weight": ("BF16", size)
            for name, size in _linears(hidden, layer).items()
            if "mlp" not in name
        }
        tensors[f"{block}.gate.weight"] = ("BF16", (EXPERTS, hidden))
        for expert in range(EXPERTS):
            for one in ("w1", "w2", "w3"):
                tensors[f"{block}.experts.{expert}.{one}.weight"] = ("BF16", (hidden, hidden))
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": hidden}
    named = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return _write(folder, _config(hidden, **named, **experts), tensors)


LARGE = {"dense": dense, "awq": awq, "mixture": mixture}


def _write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Large:
    tiny = folder.with_name(f"{folder.name}-tokenizer")
    build("llama", tiny)
    folder.mkdir(parents=True)
    for path in tiny.glob("tokenizer*"):
        shutil.copy(path, folder)
    shutil.rmtree(tiny)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return Large(folder, offset)
