"""Refuses tensor parallelism for options and models whose tokens were never compared on several devices."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.model import support
from dlinfer.framework.lmdeploy_ext.conversion.plan import is_packed_as_it_loads
from dlinfer.framework.lmdeploy_ext.device import ranks
from dlinfer.framework.lmdeploy_ext.device.activation import refuse

_NAMES = "Llama Qwen2 Qwen3 InternLM2 Mixtral Qwen2Moe Qwen3Moe Mistral Gemma Gemma2 InternLM3"
COMPARED = [f"{name}ForCausalLM" for name in _NAMES.split()]
"""LMDeploy's classes of the model families that tests/e2e/test_tensor_parallel.py compares."""

COMPARED_PACKED = {"awq": ("LlamaForCausalLM",), "smooth_quant": ("LlamaForCausalLM",)}
"""Quantisation method -> LMDeploy's classes that the test compares with this method."""

_MOST_RANKS = 8
"""LMDeploy's executor 'mp' addresses ranks by the 8 bits of a mask."""

_ADVICE = "use tp=1 with one server per socket (docs/guides/tensor_parallel.md)"


def check_engine_config(config: Any) -> None:
    """Raise UnsupportedFeatureError if ``tp > 1`` is not served on the device or with the other options.

    config: a PytorchEngineConfig.
    """
    if config.tp == 1:
        return
    device = config.device_type
    if not ranks.are_served(device):
        raise refuse(f"tp={config.tp!r}", _ADVICE, device)
    if config.tp > _MOST_RANKS and config.distributed_executor_backend != "ray":
        advice = f"use at most tp={_MOST_RANKS}, or distributed_executor_backend='ray'"
        raise refuse(f"tp={config.tp!r}", advice, device)
    if not config.eager_mode and not ranks.graphs_are_served(device):
        raise refuse(f"tp={config.tp!r} in graph mode", "set eager_mode=True", device)
    if config.adapters:
        raise refuse(f"tp={config.tp!r} with LoRA adapters", _ADVICE, device)


def check_model(config: dict[str, Any], tp: int, spec_method: str | None) -> None:
    """Raise UnsupportedFeatureError for a model that is not served with tp > 1.

    config: the contents of ``config.json``. spec_method: the method of speculative decoding, or None.
    """
    if tp == 1:
        return
    names = support.architectures(config)
    if not set(names) <= set(COMPARED):
        raise refuse(f"tp={tp} of {', '.join(names)}", f"{_ADVICE}, or a model of {', '.join(COMPARED)}")
    for part, stored in support.quantisation_of(config):
        method = str(stored.get("quant_method", "unknown"))
        if not set(support.architectures(part)) <= set(COMPARED_PACKED.get(method, ())):
            raise refuse(f"tp={tp} of a {', '.join(names)} quantised as {method}", _ADVICE)
        if method == "awq" and is_packed_as_it_loads(stored):
            raise refuse(
                f"tp={tp} with DLINFER_CPU_WEIGHTS=int4", f"use an AWQ model, set int8 or bf12, or {_ADVICE}"
            )
        if method == "awq" and not _divides(part, tp * int(stored.get("group_size", 128))):
            raise refuse(
                f"tp={tp} of an AWQ model with layers that do not split into whole groups for each rank",
                _ADVICE,
            )
    if spec_method is not None:
        raise refuse(f"tp={tp} with speculative decoding", _ADVICE)


def _divides(config: dict[str, Any], unit: int) -> bool:
    """Return whether ``unit`` divides the sizes along which tensor parallelism splits a dense model's linear layers.

    unit: tp times the size of a quantisation group.
    """
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    sizes = (config["intermediate_size"], heads * head, (config.get("num_key_value_heads") or heads) * head)
    return all(size % unit == 0 for size in sizes)
