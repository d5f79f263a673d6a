"""Refuses tensor parallelism for options and models whose tokens were never compared on several devices."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.model import support
from dlinfer.framework.lmdeploy_ext.device import ranks
from dlinfer.framework.lmdeploy_ext.device.activation import refuse

COMPARED = [f"{name}ForCausalLM" for name in "Llama Qwen2 Qwen3 InternLM2 Mixtral Qwen2Moe Qwen3Moe".split()]
"""LMDeploy's classes of the model families that tests/e2e/devices/test_tensor_parallel.py compares."""

_ADVICE = "use tp=1"


def check_engine_config(config: Any) -> None:
    """Raise UnsupportedFeatureError for options that are not served with tp > 1. config: a PytorchEngineConfig."""
    if config.tp == 1:
        return
    device = config.device_type
    if not ranks.are_served(device):
        raise refuse(f"tp={config.tp!r}", _ADVICE, device)
    if not config.eager_mode:
        raise refuse(f"tp={config.tp!r} in graph mode", "add eager_mode=True", device)
    if config.adapters:
        raise refuse(f"tp={config.tp!r} with adapters", _ADVICE, device)


def check_model(config: dict[str, Any], tp: int, spec_method: str | None) -> None:
    """Raise UnsupportedFeatureError for a model that is not served with tp > 1.

    config: the contents of ``config.json``. spec_method: the method of speculative decoding, or None.
    """
    if tp == 1:
        return
    names = support.architectures(config)
    if not set(names) <= set(COMPARED):
        raise refuse(f"tp={tp} of {', '.join(names)}", f"{_ADVICE}, or a model of {', '.join(COMPARED)}")
    if any(support.quantisation_of(config)):
        raise refuse(f"tp={tp} of a quantised model", _ADVICE)
    if spec_method is not None:
        raise refuse(f"tp={tp} with speculative decoding", _ADVICE)
