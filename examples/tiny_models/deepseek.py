"""A DeepSeek-MoE checkpoint (DeepSeek's first, with plain attention) made from a Qwen2-MoE one, which is its oracle.

DeepSeek-MoE has no class in transformers. It is Qwen2-MoE without biases on q, k and v and without a gate in front of
the shared expert. A gate whose weight is zero lets exactly half of the shared expert through, so half of its weight is
the weight of DeepSeek's.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIGURATION = '''"""Configuration of a tiny DeepSeek-MoE-style model."""

from transformers import PretrainedConfig


class DeepseekConfig(PretrainedConfig):
    model_type = "deepseek"
    keys_to_ignore_at_inference = ["past_key_values"]
'''


def prepare(model: Any) -> None:
    """Let the gates of the shared experts of a ``Qwen2MoeForCausalLM`` be one half. The model is changed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("shared_expert_gate.weight"):
                parameter.zero_()


def save(model: Any, folder: Path) -> None:
    """Write the DeepSeek twin of a prepared ``Qwen2MoeForCausalLM``: weights, config.json and configuration code."""
    qwen = model.config
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.endswith("shared_expert_gate.weight"):
            continue
        block, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(weight):
                gate, up = both.chunk(2)
                weights[f"{block}.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                weights[f"{block}.experts.{expert}.up_proj.weight"] = up.contiguous()
        elif kind == "down_proj":
            for expert, down in enumerate(weight):
                weights[f"{block}.experts.{expert}.down_proj.weight"] = down.contiguous()
        else:
            half = name.endswith("shared_expert.down_proj.weight")
            weights[name.replace("shared_expert.", "shared_experts.")] = (
                weight * 0.5 if half else weight.clone()
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DeepseekForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
        "model_type": "deepseek",
        "hidden_act": "silu",
        "n_routed_experts": qwen.num_experts,
        "n_shared_experts": qwen.shared_expert_intermediate_size // qwen.moe_intermediate_size,
        "first_k_dense_replace": len(qwen.mlp_only_layers),
        "moe_layer_freq": 1,
        "norm_topk_prob": qwen.norm_topk_prob,
        "scoring_func": "softmax",
        "rope_theta": 10000.0,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
    for key in (
        "vocab_size hidden_size intermediate_size moe_intermediate_size num_experts_per_tok num_hidden_layers"
        " num_attention_heads num_key_value_heads max_position_embeddings rms_norm_eps bos_token_id eos_token_id"
        " pad_token_id tie_word_embeddings"
    ).split():
        config[key] = getattr(qwen, key)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "configuration_deepseek.py").write_text(CONFIGURATION)
