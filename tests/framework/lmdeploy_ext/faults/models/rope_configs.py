"""Configurations of Phi-3.5-MoE and MiniCPM3 of several rope types, and objects with a patched constructor."""

from types import SimpleNamespace
from typing import Any

from transformers import MiniCPM3Config, PhimoeConfig, PretrainedConfig

ORIGINAL, HEAD = 64, 8
SIZES: dict[str, Any] = {
    "hidden_size": 4 * HEAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
LATENT: dict[str, Any] = {"qk_rope_head_dim": HEAD, "qk_nope_head_dim": 2 * HEAD}
LONGROPE: dict[str, Any] = {
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)],
    "long_factor": [1.0 + 2.0 * i for i in range(HEAD // 2)],
    "original_max_position_embeddings": ORIGINAL,
}
SCALES = {"short_mscale": 1.2, "long_mscale": 1.4}
OF_CHECKPOINT = {"rope_theta": 5e4, "rope_scaling": {"type": "longrope", **LONGROPE}}


def phimoe(**fields: Any) -> PhimoeConfig:
    return PhimoeConfig(**SIZES | fields)


def phimoe_longrope() -> PhimoeConfig:
    return phimoe(rope_parameters={"rope_type": "longrope", "rope_theta": 5e4, **LONGROPE, **SCALES})


def phimoe_as_released() -> PhimoeConfig:
    return phimoe(**OF_CHECKPOINT | {"rope_scaling": OF_CHECKPOINT["rope_scaling"] | SCALES})


def minicpm3(**fields: Any) -> MiniCPM3Config:
    return MiniCPM3Config(**SIZES | LATENT | fields)


class ConfigOfACheckpoint(PretrainedConfig):
    """As configurations that come as code are written: no field of transformers 5 for rope parameters."""

    model_type = "minicpm3"

    def __init__(self, rope_theta: float = 1e4, rope_scaling: Any = None, **fields: Any) -> None:
        for name, value in (SIZES | LATENT).items():
            setattr(self, name, value)
        self.q_lora_rank = 24
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        super().__init__(**fields)


PHIMOE = {
    "default": phimoe,
    "longrope": phimoe_longrope,
    "as released": phimoe_as_released,
}
MINICPM3 = {
    "default": minicpm3,
    "linear": lambda: minicpm3(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "as released": lambda: minicpm3(**OF_CHECKPOINT),
    "scale given": lambda: minicpm3(
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.3, **LONGROPE}
    ),
}


def made_by(patch: Any, *given: Any, **fields: Any) -> SimpleNamespace:
    """An object whose class has only this ``__init__``, which gives it these fields."""
    made = SimpleNamespace()
    patch.build(lambda self, *_: vars(self).update(fields))(made, *given)
    return made
