"""An InternLM3 checkpoint made from a Llama one, which is then its oracle.

InternLM3 has no class in transformers: its checkpoints carry their configuration as code (``trust_remote_code``).
The network is Llama's, weight names included, with biases in every linear layer where ``qkv_bias`` and ``bias`` say
so, and with dynamic NTK scaling.
"""

import json
from pathlib import Path
from typing import Any

CONFIGURATION = '''"""Configuration of a tiny InternLM3-style model."""

from transformers import PretrainedConfig


class InternLM3Config(PretrainedConfig):
    model_type = "internlm3"
    keys_to_ignore_at_inference = ["past_key_values"]
'''


def save(model: Any, folder: Path) -> None:
    """Write the InternLM3 twin of a ``LlamaForCausalLM`` with biases: weights, config.json and configuration code."""
    llama = model.config
    model.save_pretrained(folder)
    rope = dict(llama.rope_parameters)
    config = {
        "architectures": ["InternLM3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_internlm3.InternLM3Config"},
        "model_type": "internlm3",
        "qkv_bias": llama.attention_bias,
        "bias": llama.mlp_bias,
        "hidden_act": "silu",
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "head_dim": llama.head_dim,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
    for key in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        " max_position_embeddings rms_norm_eps bos_token_id eos_token_id pad_token_id tie_word_embeddings"
    ).split():
        config[key] = getattr(llama, key)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "configuration_internlm3.py").write_text(CONFIGURATION)
