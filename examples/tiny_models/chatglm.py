"""A ChatGLM checkpoint (ChatGLM3, GLM-4-9B) made from one of transformers' ``Glm``, which is then its oracle.

The network is the same; the configuration is code of the checkpoint (``trust_remote_code``), weights have other names,
and q, k and v lie one above the other in one weight.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIGURATION = '''"""Configuration of a tiny ChatGLM-style model."""

from transformers import PretrainedConfig


class ChatGLMConfig(PretrainedConfig):
    model_type = "chatglm"
    attribute_map = {"num_hidden_layers": "num_layers"}
    keys_to_ignore_at_inference = ["past_key_values"]
'''

RENAMED = {
    "model.embed_tokens.weight": "transformer.embedding.word_embeddings.weight",
    "model.norm.weight": "transformer.encoder.final_layernorm.weight",
    "lm_head.weight": "transformer.output_layer.weight",
}
RENAMED_IN_LAYER = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}


def save(
    model: Any,
    folder: Path,
    beside: Mapping[str, torch.Tensor] | None = None,
    further: Mapping[str, Any] | None = None,
) -> None:
    """Write the ChatGLM twin of a ``GlmForCausalLM``: weights, config.json and configuration code.

    beside: further weights. further: further parts of the configuration.
    """
    glm, state = model.config, model.state_dict()
    weights = {new: state[old].contiguous() for old, new in RENAMED.items()}
    for i in range(glm.num_hidden_layers):
        layer, twin = f"model.layers.{i}.", f"transformer.encoder.layers.{i}."
        for old, new in RENAMED_IN_LAYER.items():
            weights[f"{twin}{new}.weight"] = state[f"{layer}{old}.weight"].contiguous()
        for kind in ("weight", "bias"):
            parts = [state[f"{layer}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            weights[f"{twin}self_attention.query_key_value.{kind}"] = torch.cat(parts)
    weights |= beside or {}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["ChatGLMForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
        "model_type": "chatglm",
        "num_layers": glm.num_hidden_layers,
        "padded_vocab_size": glm.vocab_size,
        "vocab_size": glm.vocab_size,
        "hidden_size": glm.hidden_size,
        "ffn_hidden_size": glm.intermediate_size,
        "num_attention_heads": glm.num_attention_heads,
        "kv_channels": glm.head_dim,
        "multi_query_attention": True,
        "multi_query_group_num": glm.num_key_value_heads,
        "seq_length": glm.max_position_embeddings,
        "layernorm_epsilon": glm.rms_norm_eps,
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "fp32_residual_connection": False,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "rope_ratio": 1.0,
        "bos_token_id": glm.bos_token_id,
        "eos_token_id": glm.eos_token_id,
        "pad_token_id": glm.pad_token_id,
        "tie_word_embeddings": False,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
    config |= further or {}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "configuration_chatglm.py").write_text(CONFIGURATION)
