"""Models that would give other tokens than transformers, or fail on the way, are refused when LMDeploy reads their
configuration: before any weight is loaded.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from dlinfer.framework.lmdeploy_ext import install, refusals, rope_parameters, windows
from dlinfer.framework.patching import Patch

# Model types that LMDeploy 0.18 has a class for, and why they do not run here.
_REFUSED = {
    "gpt_oss": "its experts have biases and an activation of their own, and LMDeploy's loader needs CUDA",
    "glm4_moe": "LMDeploy's class routes tokens by a softmax, where the model has sigmoids and a correction bias",
    "phimoe": "LMDeploy's class cannot read the rope parameters of transformers 5",
    "minicpm3": "LMDeploy's class cannot read the rope parameters of transformers 5",
}


def check(model_config: Any) -> None:
    """Raise UnsupportedFeatureError for a model that cannot be served. model_config: LMDeploy's, adjusted in place."""
    config = model_config.llm_config or model_config.hf_config
    kind = getattr(config, "model_type", "")
    if kind in _REFUSED:
        raise refusals.refuse(f"the model type {kind!r} ({_REFUSED[kind]})", "use another model")
    quantised = getattr(model_config.hf_config, "quantization_config", None) or getattr(
        config, "quantization_config", None
    )
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        advice = "use the unquantised model in bfloat16 or float32"
        raise refusals.refuse(f"{method or 'this'} quantisation", advice)
    rope_parameters.check(config)
    windows.check(model_config)


def _from_hf_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_hf_config(cls: Any, hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        model_config = original(cls, hf_config, *args, **kwargs)
        if install.active() is not None:
            check(model_config)
        return model_config

    return from_hf_config


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.config:ModelConfig.from_hf_config",
        why="the first to know the model's configuration; it checks nothing of what our devices serve",
        signature="(cls, hf_config, model_path=None, dtype='auto', dist_config=None, is_draft_model=False, "
        "spec_method=None, device_type='auto', num_spec_tokens=0)",
        build=_from_hf_config,
    ),
)
