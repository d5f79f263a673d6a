"""Refuses a session_len above a model's number of positions, because tokens beyond it would be noise."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import language_configs
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters

_SCALED_TOTAL = ("longrope", "su", "llama3", "mrope", "default")
"""Rope types whose max_position_embeddings already includes the scaling."""


def positions(config: Any) -> int | None:
    """Return a text model's number of positions; None for no limit.

    If the rope type scales positions, the number is ``factor`` times the original length, as in other engines.
    """
    most = getattr(config, "max_position_embeddings", None)
    rope = rope_parameters.parameters(config)
    kind = rope_parameters.rope_type(rope)
    if most is None or kind == "dynamic":  # dynamic rope rescales its frequencies as the text grows
        return None
    factor = rope.get("factor")
    if kind in _SCALED_TOTAL or not isinstance(factor, int | float):
        return most
    original = rope.get("original_max_position_embeddings") or most if kind == "yarn" else most
    return max(most, int(original * factor))


def check(model_path: str, session_len: int | None, trust_remote_code: bool) -> None:
    """Raise UnsupportedFeatureError if session_len exceeds the positions of the model in the folder ``model_path``."""
    if session_len is None:
        return
    from lmdeploy.hf_configs import config_from_pretrained

    config = config_from_pretrained(model_path, trust_remote_code=trust_remote_code)
    check_config(language_configs(config)[-1], session_len)


def check_config(config: Any, session_len: int | None) -> None:
    """Raise UnsupportedFeatureError if session_len exceeds a text model's positions.

    config: the text model's configuration.
    """
    most = positions(config)
    if session_len is not None and most is not None and session_len > most:
        raise refuse(
            f"session_len={session_len}, more than the model's {most} positions,",
            f"use session_len={most}, or scale its rope_parameters in config.json (yarn)",
        )
