"""Refuses tensor parallelism for engines and models whose tokens were not compared on several devices."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.model import support
from dlinfer.framework.lmdeploy_ext.device import ranks
from dlinfer.framework.lmdeploy_ext.device.activation import refuse

COMPARED = [f"{name}ForCausalLM" for name in "Llama Qwen2 Qwen3 InternLM2 Mixtral Qwen2Moe Qwen3Moe".split()]
"""LMDeploy's classes of the families in tests/e2e/devices/test_tensor_parallel.py."""

_ADVICE = "use tp=1"


def check_engine_config(config: Any) -> None:
    """Raise UnsupportedFeatureError for options that were not compared on several devices."""
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
    """The same for a model. config: as ``config.json`` has it. spec_method: of speculative decoding."""
    if tp == 1:
        return
    names = support.architectures(config)
    if not set(names) <= set(COMPARED):
        raise refuse(f"tp={tp} of {', '.join(names)}", f"{_ADVICE}, or a model of {', '.join(COMPARED)}")
    if any(support.quantisation_of(config)):
        raise refuse(f"tp={tp} of a quantised model", _ADVICE)
    if spec_method is not None:
        raise refuse(f"tp={tp} with speculative decoding", _ADVICE)
