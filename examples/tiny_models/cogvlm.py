"""CogVLM and CogVLM2 checkpoints of random weights, with the configuration as code that theirs carry."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .cogvlm_network import Network
from .families import BOS, EOS, STOP_IDS, VOCAB_SIZE

CONFIGURATION = '''"""Configuration of a tiny CogVLM-style model."""

from transformers import PretrainedConfig


class CogVLMConfig(PretrainedConfig):
    def __init__(self, vision_config=None, **kwargs):
        self.vision_config = vision_config
        super().__init__(**kwargs)
'''

_COMMON = {
    "architectures": ["CogVLMForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_cogvlm.CogVLMConfig",
        "AutoModelForCausalLM": "modeling_cogvlm.CogVLMForCausalLM",
    },
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_VISION = {
    "dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 32,
    "in_channels": 3,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-6,
    "num_heads": 2,
    "num_hidden_layers": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # The number of positions tells CogVLM from CogVLM2, so that there are as many patches as in its own checkpoints.
    "cogvlm": _COMMON
    | {
        "pad_token_id": 0,
        "vision_config": _VISION | {"image_size": 70, "patch_size": 2, "num_positions": 1226},
    },
    "cogvlm2": _COMMON
    | {
        "num_multi_query_heads": 2,
        "vision_config": _VISION | {"image_size": 40, "patch_size": 4, "num_positions": 101},
    },
}


def make(family: str) -> Any:
    """A network of random weights."""
    return spread(Network(CONFIGS[family]))


def spread(network: Any) -> Any:
    """A network whose weights are changed to as large ones as in the other tiny models."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            elif not name.endswith(("boi", "eoi")):
                parameter.normal_(std=0.2)
    return network


def save(network: Any, folder: Path) -> None:
    """Write weights, config.json, its code, and the tokens that end a text."""
    dtype = str(network.lm_head.weight.dtype).removeprefix("torch.")
    weights = {name: weight.contiguous() for name, weight in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = network.config | {"dtype": dtype}
    ends = {"bos_token_id": BOS, "eos_token_id": STOP_IDS}
    for name, content in (("config.json", config), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "configuration_cogvlm.py").write_text(CONFIGURATION)
