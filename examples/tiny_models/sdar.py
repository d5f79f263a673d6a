"""An SDAR checkpoint made from a Qwen3 or Qwen3-MoE one, whose network it has.

SDAR has no class in transformers: its checkpoints carry their configuration as code (``trust_remote_code``). A token
sees its block of tokens and all tokens before the block, and a model generates block by block.
"""

import json
from pathlib import Path
from typing import Any

MASK = 999
BLOCK = 4

CONFIGURATION = '''"""Configuration of a tiny SDAR-style model."""

from transformers import PretrainedConfig


class SDARConfig(PretrainedConfig):
    model_type = "{model_type}"
    keys_to_ignore_at_inference = ["past_key_values"]
'''

_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    " max_position_embeddings rms_norm_eps bos_token_id eos_token_id pad_token_id tie_word_embeddings attention_bias"
    " attention_dropout hidden_act num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"
    " decoder_sparse_step mlp_only_layers"
)


def save(model: Any, folder: Path) -> None:
    """Write the SDAR twin of a ``Qwen3ForCausalLM`` or ``Qwen3MoeForCausalLM``: its weights with another config.json.

    Like the released configurations, it has a window that is switched off.
    """
    model.save_pretrained(folder)
    has_experts = hasattr(model.config, "num_experts")
    model_type = "sdar_moe" if has_experts else "sdar"
    config = {
        "architectures": ["SDARMoeForCausalLM" if has_experts else "SDARForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig"},
        "model_type": model_type,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "rope_theta": model.config.rope_parameters["rope_theta"],
        "use_sliding_window": False,
        "sliding_window": 16,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
    config |= {name: getattr(model.config, name) for name in _FIELDS.split() if hasattr(model.config, name)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "configuration_sdar.py").write_text(CONFIGURATION.format(model_type=model_type))
