"""Models that would give other tokens than transformers, or fail on the way, are refused when LMDeploy reads their
configuration: before any weight is loaded.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.folder import config_fields, ties
from dlinfer.framework.lmdeploy_ext.checks.model import model_support, speculation, tensor_parallel
from dlinfer.framework.lmdeploy_ext.conversion import loading
from dlinfer.framework.lmdeploy_ext.conversion.plan import QUANTISED_FORMATS
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.faults.models import model_classes
from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta_model
from dlinfer.framework.lmdeploy_ext.layers.moe import experts_model, packed_experts_model
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rope_parameters, windows
from dlinfer.framework.patching import Patch


def check(model_config: Any, is_draft: bool = False) -> None:
    """Raise UnsupportedFeatureError for a model that cannot be served. model_config: LMDeploy's, adjusted in place."""
    model_support.check_support(model_config.hf_config.to_dict(), is_draft)
    config = model_config.llm_config or model_config.hf_config
    rope_parameters.check(config)
    windows.check(model_config)
    gated_delta_model.check(model_config)
    experts_model.check(config)
    model_classes.check(config)
    config_fields.check(config)
    if rope_lengths.of_model(config) is not None:
        activation.require(rope_lengths.FEATURE)
    hf_config = model_config.hf_config
    if hasattr(hf_config, "experts_packed_as") or any(model_support.quantisation_of(hf_config.to_dict())):
        activation.require(packed_experts_model.FEATURE)


def _from_hf_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_hf_config(cls: Any, hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        method, is_draft = kwargs.get("spec_method"), kwargs.get("is_draft_model", False)
        if activation.active() is not None and method is not None:
            (speculation.check_draft if is_draft else speculation.check_target)(hf_config, method)
        if activation.active() is not None:
            activation.require(hf_config.model_type)
            tensor_parallel.check_model(hf_config.to_dict(), _tp(*args, **kwargs), method)
            ties.settle(hf_config, _folder(*args, **kwargs))
        model_config = original(cls, hf_config, *args, **kwargs)
        if activation.active() is not None:
            check(model_config, is_draft)
        return model_config

    return from_hf_config


def _folder(model_path: Any = None, *_: Any, **others: Any) -> Path | None:
    return None if model_path is None else Path(model_path)


def _tp(model_path: Any = None, dtype: Any = "auto", dist_config: Any = None, *_: Any, **others: Any) -> int:
    return 1 if dist_config is None else dist_config.tp


def _patch_quantisation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _patch_quantization_config(hf_config: Any, model_format: str | None = None) -> Any:
        if activation.active() is None:
            return original(hf_config, model_format)
        stored = getattr(hf_config, "quantization_config", None)
        loading.rewrite(hf_config)
        if model_format not in QUANTISED_FORMATS:
            return original(hf_config, model_format)
        if stored is None:
            raise refuse(f"{model_format=} for a model that is not quantised", "leave model_format out")
        return hf_config  # by another method it is refused in ``check``

    return _patch_quantization_config


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.config:_patch_quantization_config",
        why="the first to see how a model is quantised: GPTQ and compressed-tensors become a method of LMDeploy's; and "
        "model_format fails for a model in floats in LMDeploy's words, and is warned of for one that has that format",
        signature="(hf_config, model_format=None)",
        build=_patch_quantisation,
        essential=False,  # LMDeploy stops at a method that it does not know
    ),
    Patch(
        target="lmdeploy.pytorch.config:ModelConfig.from_hf_config",
        why="the first to know the model's configuration; it checks nothing of what our devices serve",
        signature="(cls, hf_config, model_path=None, dtype='auto', dist_config=None, is_draft_model=False, "
        "spec_method=None, device_type='auto', num_spec_tokens=0)",
        build=_from_hf_config,
    ),
)
