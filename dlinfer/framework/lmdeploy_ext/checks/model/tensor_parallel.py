"""Refuses tensor parallelism for options and models whose tokens were never compared on several devices."""

from dataclasses import dataclass
from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.model import support
from dlinfer.framework.lmdeploy_ext.checks.model.quantisation import BLOCK
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import linear_sizes
from dlinfer.framework.lmdeploy_ext.conversion.plan import rounded_in_place
from dlinfer.framework.lmdeploy_ext.device import devices, ranks
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.gguf.folder import GGUF_FILE

_NAMES = "Llama Qwen2 Qwen3 InternLM2 Mixtral Qwen2Moe Qwen3Moe Mistral Gemma Gemma2 InternLM3"
COMPARED = [f"{name}ForCausalLM" for name in _NAMES.split()]
"""LMDeploy's classes of the model families that tests/e2e/test_tensor_parallel.py compares."""

_DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
_INTERNLM = ("InternLM2ForCausalLM", "InternLM3ForCausalLM")
COMPARED_PACKED = {
    "awq": COMPARED,
    # Not of experts: between their projections a token has one scale, which no rank knows alone.
    "smooth_quant": (*_DENSE, *_INTERNLM),
    "fp8": (*_DENSE, "MixtralForCausalLM", "Qwen3MoeForCausalLM"),
    "compressed-tensors": ("Qwen3MoeForCausalLM",),  # only the experts are packed
}
"""Quantisation method -> LMDeploy's classes that the test compares with this method."""

_AWQ_WORD = 8
"""Numbers in a word of AWQ's. They are outputs."""
_EXPERTS_GROUP = 32
"""The group size of LMDeploy's experts for compressed-tensors."""

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
    if config.adapters and not devices.shares_host(device):
        raise refuse(f"tp={config.tp!r} with LoRA adapters", _ADVICE, device)


def check_model(config: dict[str, Any], tp: int, spec_method: str | None) -> None:
    """Raise UnsupportedFeatureError for a model that is not served with tp > 1.

    config: the contents of ``config.json``. spec_method: the method of speculative decoding, or None.
    """
    if tp == 1:
        return
    if GGUF_FILE in config:
        raise refuse(f"tp={tp} of a GGUF file", f"{_ADVICE}, or the model in the format of Hugging Face")
    names = support.architectures(config)
    if not set(names) <= set(COMPARED):
        raise refuse(f"tp={tp} of {', '.join(names)}", f"{_ADVICE}, or a model of {', '.join(COMPARED)}")
    if (bits := rounded_in_place(config)) and not any(support.quantisation_of(config)):
        raise refuse(
            f"tp={tp} of {', '.join(names)} with DLINFER_CPU_WEIGHTS={bits}", f"{_ADVICE}, or unset it"
        )
    _require_whole_heads(config, tp)
    _require_whole_parts(config, tp, _Units())
    for part, stored in support.quantisation_of(config):
        method = str(stored.get("quant_method", "unknown"))
        if not set(support.architectures(part)) <= set(COMPARED_PACKED.get(method, ())):
            raise refuse(f"tp={tp} of a {', '.join(names)} quantised as {method}", _ADVICE)
        _require_whole_parts(part, tp, _units(method, stored))
    if spec_method is not None:
        raise refuse(f"tp={tp} with speculative decoding", _ADVICE)


@dataclass(frozen=True)
class _Units:
    """How many neighbouring numbers of a weight have to be on one rank.

    inputs: neighbours among the inputs of o and down. heads: neighbours among the outputs of k and v.
    """

    inputs: int = 1
    heads: int = 1


def _units(method: str, stored: dict[str, Any]) -> _Units:
    if method == "awq":
        return _Units(int(stored.get("group_size", 128)), _AWQ_WORD)
    if method == "fp8" and stored.get("weight_block_size"):
        return _Units(BLOCK, BLOCK)
    if method == "compressed-tensors":
        return _Units(_EXPERTS_GROUP)
    return _Units()


def _require_whole_heads(config: dict[str, Any], tp: int) -> None:
    """Raise UnsupportedFeatureError unless all ranks get as many heads as the others. k's and v's may be shared."""
    heads = config.get("num_attention_heads") or tp
    of_keys = config.get("num_key_value_heads") or heads
    if heads % tp or (of_keys % tp and tp % of_keys):
        shown = f"num_attention_heads = {heads} and num_key_value_heads = {of_keys}"
        raise refuse(f"tp={tp} of a model with {shown}", f"use a tp that divides both, or {_ADVICE}")


def _require_whole_parts(config: dict[str, Any], tp: int, units: _Units) -> None:
    """Raise UnsupportedFeatureError unless tp ranks get equal parts of whole units of each size that they split."""
    of_keys = config.get("num_key_value_heads") or config.get("num_attention_heads") or tp
    for name, size in linear_sizes(config).items():
        is_of_keys = name.startswith("num_key_value_heads")
        parts, unit = (min(tp, of_keys), units.heads) if is_of_keys else (tp, units.inputs)
        if name != "hidden_size" and size % (parts * unit):
            whole = f"; each rank needs a multiple of {unit} (whole groups and blocks)"
            feature = f"tp={tp} of a model with {name} = {size}{whole if unit > 1 else ''}"
            raise refuse(
                feature, f"use a smaller tp, {'unquantised weights, ' if unit > 1 else ''}or {_ADVICE}"
            )
