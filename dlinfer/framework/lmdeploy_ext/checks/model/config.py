"""Refuses models that would generate other tokens than transformers. Reads their configuration before weights load."""

from pathlib import Path
from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.model import (
    block_diffusion,
    config_fields,
    invariance,
    speculation,
    support,
    tensor_parallel,
)
from dlinfer.framework.lmdeploy_ext.conversion import loading, tied_heads
from dlinfer.framework.lmdeploy_ext.conversion.plan import QUANTISED_FORMATS
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.faults.models import minicpm3, phimoe
from dlinfer.framework.lmdeploy_ext.layers.compressed_attention import model as compressed_model
from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta_model
from dlinfer.framework.lmdeploy_ext.layers.moe import experts_model, packed_experts_model
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rope_parameters, windows
from dlinfer.framework.lmdeploy_ext.ngram.method import METHOD
from dlinfer.framework.patching import Original, replaces


def check(model_config: Any, is_draft: bool = False) -> None:
    """Raise UnsupportedFeatureError for a model that cannot be served.

    model_config: LMDeploy's ModelConfig; some checks adjust it in place. is_draft: whether the model drafts tokens for
    speculative decoding.
    """
    support.check_support(model_config.hf_config.to_dict(), is_draft)
    invariance.check_model(model_config.hf_config, activation.active())
    config = model_config.llm_config or model_config.hf_config
    rope_parameters.check(config)
    windows.check(model_config)
    block_diffusion.check_model(model_config)
    gated_delta_model.check(model_config)
    compressed_model.check(model_config)
    experts_model.check(config)
    own_check = {"phimoe": phimoe.check, "minicpm3": minicpm3.check}.get(getattr(config, "model_type", ""))
    if own_check is not None:
        own_check(config)
    config_fields.check(config)
    if rope_lengths.of_model(config) is not None:
        activation.require(rope_lengths.FEATURE)
    hf_config = model_config.hf_config
    if hasattr(hf_config, "experts_packed_as") or any(support.quantisation_of(hf_config.to_dict())):
        activation.require(packed_experts_model.FEATURE)


@replaces(
    "lmdeploy.pytorch.config:ModelConfig.from_hf_config",
    why="accepts models that the device does not serve, or would serve with other tokens than transformers",
    when=activation.is_on,
)
def from_hf_config(
    original: Original,
    cls: Any,
    hf_config: Any,
    model_path: str | None = None,
    dtype: str = "auto",
    dist_config: Any = None,
    is_draft_model: bool = False,
    spec_method: str | None = None,
    device_type: str = "auto",
    num_spec_tokens: int = 0,
) -> Any:
    activation.require(hf_config.model_type)
    if spec_method is not None:
        (speculation.check_draft if is_draft_model else speculation.check_target)(hf_config, spec_method)
    tp = 1 if dist_config is None else dist_config.tp
    tensor_parallel.check_model(hf_config.to_dict(), tp, spec_method)
    tied_heads.settle(hf_config, None if model_path is None else Path(model_path))
    looks_up = spec_method == METHOD
    if looks_up:  # which changes nothing in the model
        spec_method, num_spec_tokens = None, 0
    model_config = original(
        cls,
        hf_config,
        model_path,
        dtype,
        dist_config,
        is_draft_model,
        spec_method,
        device_type,
        num_spec_tokens,
    )
    check(model_config, is_draft_model)
    if looks_up:
        speculation.check_states(model_config)
    return model_config


@replaces(
    "lmdeploy.pytorch.config:_patch_quantization_config",
    why="does not convert GPTQ and compressed-tensors, warns of a model_format that the model already has, and calls "
    "a model_format unsupported if the model is not quantised",
    when=activation.is_on,
    essential=False,  # without the patch LMDeploy refuses methods that it does not know
)
def patch_quantization_config(original: Original, hf_config: Any, model_format: str | None = None) -> Any:
    stored = getattr(hf_config, "quantization_config", None)
    loading.rewrite(hf_config)
    if model_format not in QUANTISED_FORMATS:
        return original(hf_config, model_format)
    if not stored:
        raise refuse(f"{model_format=} for a model that is not quantised", "leave model_format out")
    return hf_config  # ``check`` refuses a checkpoint of another method
