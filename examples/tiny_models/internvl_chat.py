"""An InternVLChatModel checkpoint (InternVL 1.5 to 3) made from an InternVLForConditionalGeneration, its oracle.

It has no class in transformers: its checkpoints carry their configuration as code (``trust_remote_code``). The network
is the same, with other weight names, and with q, k and v of the vision model packed into one ``qkv``. The language
model keeps the names of its own class; where that is InternLM2, a Llama is packed as its own checkpoints are.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import internlm2

CONFIGURATION = '''"""Configuration of a tiny InternVL-style model."""

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from .configuration_internlm2 import InternLM2Config

LANGUAGE = {
    "InternLM2ForCausalLM": InternLM2Config,
    "LlamaForCausalLM": LlamaConfig,
    "Qwen2ForCausalLM": Qwen2Config,
}


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(self, vision_config=None, llm_config=None, **kwargs):
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        inside = llm_config or {"architectures": ["InternLM2ForCausalLM"]}
        self.llm_config = LANGUAGE[inside["architectures"][0]](**inside)
        super().__init__(**kwargs)
'''

# As these checkpoints have it, whose images nevertheless become tiles.
PROCESSOR = {
    "feature_extractor_type": "CLIPFeatureExtractor",
    "do_resize": True,
    "do_center_crop": True,
    "do_normalize": True,
    "resample": 3,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}

RENAMED = (
    (r"^model\.", ""),
    (r"^vision_tower\.", "vision_model."),
    (r"embeddings\.cls_token$", "embeddings.class_embedding"),
    (r"embeddings\.position_embeddings$", "embeddings.position_embedding"),
    (r"embeddings\.patch_embeddings\.projection\.", "embeddings.patch_embedding."),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.projection_layer\.", "attn.proj."),
    (r"attention\.(.)_proj\.", r"attn.\1."),
    (r"attention\.(.)_norm\.", r"attn.\1_norm."),
    (r"layernorm_before\.", "norm1."),
    (r"layernorm_after\.", "norm2."),
    (r"lambda_(\d)$", r"ls\1"),
    (r"multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"^language_model\.(?!model\.)", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)


def rename(name: str) -> str:
    """A weight's name as these checkpoints have it."""
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def pack(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by their new names, the three projections of a vision layer in one: [3 * hidden, hidden]."""
    renamed = {rename(name): weight for name, weight in weights.items()}
    packed = {name: weight.contiguous() for name, weight in renamed.items() if ".attn.q." not in name}
    for name, weight in renamed.items():
        if ".attn.q." in name:
            parts = [weight, *(packed.pop(name.replace(".q.", f".{part}.")) for part in "kv")]
            packed[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    return packed


def with_internlm2(packed: dict[str, torch.Tensor], llama: Any) -> dict[str, torch.Tensor]:
    """The weights with the language model's, a Llama's of configuration ``llama``, packed as InternLM2's."""
    before = "language_model."
    inside = {name.removeprefix(before): w for name, w in packed.items() if name.startswith(before)}
    others = {name: w for name, w in packed.items() if not name.startswith(before)}
    return others | {before + name: w for name, w in internlm2.weights(llama, inside).items()}


def save(model: Any, folder: Path, language: str) -> None:
    """Write the InternVLChatModel twin: weights, config.json, the old processor's and configuration code.

    language: class of the language model inside.
    """
    whole = model.config.to_dict()
    llama = model.config.text_config
    inside, weights = whole["text_config"], pack(model.state_dict())
    if language == "InternLM2ForCausalLM":
        inside, weights = internlm2.configuration(llama, model.dtype), with_internlm2(weights, llama)
    vision = whole["vision_config"]
    config = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "model_type": "internvl_chat",
        "dtype": str(model.dtype).removeprefix("torch."),
        "downsample_ratio": whole["downsample_ratio"],
        "dynamic_image_size": True,
        "force_image_size": vision["image_size"][0],
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 4,
        "use_thumbnail": True,
        "ps_version": "v2",
        "select_layer": -1,
        "tie_word_embeddings": False,
        "llm_config": inside,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "image_size": vision["image_size"][0],
            "patch_size": vision["patch_size"][0],
            "hidden_size": vision["hidden_size"],
            "intermediate_size": vision["intermediate_size"],
            "num_hidden_layers": vision["num_hidden_layers"],
            "num_attention_heads": vision["num_attention_heads"],
            "hidden_act": vision["hidden_act"],
            "layer_norm_eps": vision["layer_norm_eps"],
            "norm_type": vision["norm_type"],
            "qkv_bias": vision["attention_bias"],
            "qk_normalization": vision["use_qk_norm"],
        },
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = vision["image_size"][0]
    processor = PROCESSOR | {"size": size, "crop_size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    (folder / "configuration_internvl_chat.py").write_text(CONFIGURATION)
    (folder / "configuration_internlm2.py").write_text(internlm2.CONFIGURATION)
