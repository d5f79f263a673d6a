"""A GLM-4V checkpoint: the ChatGLM twin of a ``Glm``, and weights of an encoder beside it."""

from pathlib import Path
from typing import Any

from . import chatglm, cogvlm
from .cogvlm_network import Vision

VISION = "transformer.vision."
"""How the names of the encoder's weights begin in the checkpoint."""

CONFIG: dict[str, Any] = {
    "dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 32,
    "image_size": 40,
    "in_channels": 3,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-6,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "num_positions": 101,
    "patch_size": 4,
    "scaling_factor": 2.0,
}


def encoder(config: dict[str, Any]) -> Vision:
    """The encoder of random weights. config: the checkpoint's."""
    hidden = config["hidden_size"]
    return Vision(config["vision_config"], hidden, config["ffn_hidden_size"], joined=hidden)


def save(model: Any, folder: Path) -> None:
    """Write the GLM-4V around a ``GlmForCausalLM``."""
    glm = model.config
    whole = {
        "vision_config": CONFIG,
        "hidden_size": glm.hidden_size,
        "ffn_hidden_size": glm.intermediate_size,
    }
    made = cogvlm.spread(encoder(whole)).to(model.dtype)
    weights = {VISION + name: weight.contiguous() for name, weight in made.state_dict().items()}
    chatglm.save(model, folder, weights, {"vision_config": CONFIG})
