"""An InternLM2 checkpoint made from a Llama one, which is then its oracle.

InternLM2 has no class in transformers: its checkpoints carry their configuration as code
(``trust_remote_code``). The network is Llama's, with other weight names and with q, k and v packed into one
``wqkv``: for each key/value head its query heads, then the key head, then the value head (layout ``hgd`` in
LMDeploy's weight loader).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIGURATION = '''"""Configuration of a tiny InternLM2-style model."""

from transformers import PretrainedConfig


class InternLM2Config(PretrainedConfig):
    model_type = "internlm2"
    keys_to_ignore_at_inference = ["past_key_values"]
'''

RENAMED = {
    "model.embed_tokens.weight": "model.tok_embeddings.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "output.weight",
}
RENAMED_IN_LAYER = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def pack_wqkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Interleave the three projections of one layer.

    Args:
        q: [num_heads * head_dim, hidden].
        k, v: [num_kv_heads * head_dim, hidden].
        head_dim: size of one head.

    Returns:
        [num_kv_heads * (group + 2) * head_dim, hidden], group = num_heads / num_kv_heads.
    """
    hidden = q.shape[1]
    kv_heads = k.shape[0] // head_dim
    parts = [w.reshape(kv_heads, -1, head_dim, hidden) for w in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, hidden).contiguous()


def pack_state_dict(
    llama: dict[str, torch.Tensor], num_layers: int, head_dim: int
) -> dict[str, torch.Tensor]:
    """Llama's weights under InternLM2's names."""
    packed = {new: llama[old].contiguous() for old, new in RENAMED.items()}
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        for old, new in RENAMED_IN_LAYER.items():
            packed[f"{layer}{new}.weight"] = llama[f"{layer}{old}.weight"].contiguous()
        q, k, v = (llama[f"{layer}self_attn.{p}_proj.weight"] for p in "qkv")
        packed[f"{layer}attention.wqkv.weight"] = pack_wqkv(q, k, v, head_dim)
    return packed


def configuration(llama: Any, dtype: Any) -> dict[str, Any]:
    """What config.json of the twin of a Llama model of this configuration says."""
    rope = dict(llama.rope_parameters)
    config = {
        "architectures": ["InternLM2ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
        "model_type": "internlm2",
        "bias": False,
        "hidden_act": "silu",
        "rope_theta": rope.pop("rope_theta"),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    for key in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        " max_position_embeddings rms_norm_eps bos_token_id eos_token_id pad_token_id tie_word_embeddings"
    ).split():
        config[key] = getattr(llama, key)
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    return config


def weights(llama: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Llama's weights under InternLM2's names, by Llama's configuration."""
    return pack_state_dict(state, llama.num_hidden_layers, llama.hidden_size // llama.num_attention_heads)


def save(model: Any, folder: Path) -> None:
    """Write the InternLM2 twin of a ``LlamaForCausalLM``: weights, config.json and configuration code."""
    packed = weights(model.config, model.state_dict())
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = configuration(model.config, model.dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "configuration_internlm2.py").write_text(CONFIGURATION)
