"""Refuses quantised checkpoints that are not served. Reads their ``quantization_config``.

LMDeploy misreads variants that it does not know. It assumes blocks of 128 for every FP8 model without static scales,
and the layout "gemm" for every AWQ model.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM, EXPERTS, SERVED, linear_sizes
from dlinfer.framework.lmdeploy_ext.conversion.plan import plan_of
from dlinfer.framework.lmdeploy_ext.device.activation import refuse

BLOCK = 128
"""Rows and columns of an FP8 block. LMDeploy's classes support no other size."""

ADVICE = "use the unquantised model in bfloat16 or float32"
_AWQ_ADVICE = "use a 4-bit AWQ model, or the unquantised model in bfloat16 or float32"

_AUTOAWQ = {"w_bit": "bits", "q_group_size": "group_size"}
"""AutoAWQ's keys in quant_config.json -> transformers' keys in ``quantization_config``."""

RENAMING = " and ".join(f"{own} to {other}" for own, other in _AUTOAWQ.items())
"""The keys of AutoAWQ's quant_config.json that the user has to rename, for texts."""

# Layers that LMDeploy never packs. Few of its model classes pass on their layers' names, so others cannot be exempt.
_NEVER_PACKED = ("lm_head", "embed_tokens", "norm")
_ROUTERS = ("gate", "shared_expert_gate")  # never packed either, in models with experts

W8A8_SERVED = [
    f"{name}ForCausalLM"
    for name in "Llama Qwen2 Qwen3 Mistral InternLM2 InternLM3 Phi3 Mixtral Qwen2Moe".split()
]
"""LMDeploy's classes that support smooth_quant: their quantised norms feed only linear layers. Other classes also
quantise norms of heads or of layer outputs, and use the quantised results as if they were floats.
"""

_FLOATS = "its attention reads only floating-point weights"
_NOT_COMPARED = "its tokens with quantised weights were never compared"
_JOINED = f"LMDeploy joins its projections, and {_NOT_COMPARED}"

FLOATS_ALONE = {
    "PhiMoEForCausalLM": _FLOATS,
    "PhimoeForCausalLM": _FLOATS,  # transformers 5's name
    "MiniCPM3ForCausalLM": _FLOATS,
    "DeepseekV32ForCausalLM": _JOINED,
    "GlmMoeDsaForCausalLM": _JOINED,
    "SDARForCausalLM": _NOT_COMPARED,
    "SDARMoeForCausalLM": _NOT_COMPARED,
    "DeepseekV4ForCausalLM": "its tokens were compared only with weights in DeepSeek's own FP8 and FP4",
}
"""LMDeploy's classes whose layers are served only with floating-point weights -> the reason.

DeepSeek-V4's own FP8 becomes floats while it loads (``conversion.deepseek_v4``).
"""

EXPERTS_ALONE = ("Qwen3MoeForCausalLM",)
"""LMDeploy's classes that can have packed experts beside floating-point layers, because they pass on layer names."""


def check(names: Sequence[str], stored: Any, model: Mapping[str, Any], is_inside: bool = False) -> None:
    """Raise UnsupportedFeatureError for a quantisation that is not served.

    names: the architectures of the model. stored: the ``quantization_config`` of the model. model: the whole
    configuration of the model, which contains ``stored``. is_inside: whether ``model`` is nested in another model's
    configuration.
    """
    config = stored if isinstance(stored, Mapping) else {}
    method = str(config.get("quant_method", "unknown"))
    plan = plan_of(config, model)
    if plan is not None:
        _require(not is_inside, f"{method} inside another model")
        if plan.config is None:
            return
        config, method = plan.config, str(plan.config["quant_method"])
    _require(method in CHECKS, method)
    for name in names:
        _require(name not in FLOATS_ALONE, f"{method}; {FLOATS_ALONE.get(name)}", name)
    CHECKS[method](names, config, model)


def _require(is_served: Any, detail: str, name: str = "model", advice: str = ADVICE) -> None:
    if not is_served:
        raise refuse(f"a quantised {name} ({detail})", advice)


def _require_class(names: Sequence[str], served: Sequence[str], method: str) -> None:
    for name in names:
        _require(name in served, f"{method}; supported are {', '.join(served)}", name)


def _check_smooth_quant(names: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    dtype = config.get("quant_dtype") or "int8"
    _require(dtype in ("int8", "float8_e4m3fn"), f"smooth_quant with quant_dtype {dtype}")
    _require_class(names, W8A8_SERVED, config.get(CONVERTED_FROM, "smooth_quant"))


def _check_fp8(names: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    fmt, scale_fmt = config.get("fmt", "e4m3"), config.get("scale_fmt")
    block = config.get("weight_block_size")
    _require(fmt == "e4m3", f"fp8 with fmt {fmt}")
    _require(scale_fmt in (None, "ue8m0"), f"fp8 with scale_fmt {scale_fmt}")
    if block is None:
        is_static = config.get("activation_scheme") == "static"
        _require(is_static, "fp8 with one scale for each tensor and dynamic activation scales")
        return
    block, blocks = list(block), [BLOCK, BLOCK]
    _require(
        block == blocks,
        f"fp8 with weight_block_size {block}",
        advice=f"use a checkpoint with blocks of {blocks}",
    )
    form = config.get(CONVERTED_FROM, "fp8")
    for name, size in linear_sizes(model).items():
        # LMDeploy joins q, k and v, and gate and up, block by block. So each must have whole blocks of rows.
        is_whole = name == "hidden_size" or size % BLOCK == 0
        _require(is_whole, f"{form} in blocks of {BLOCK}, but {name} = {size} is not a multiple of {BLOCK}")


def _check_awq(names: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    def require(is_served: Any, detail: str) -> None:
        if not is_served:
            raise refuse(f"an AWQ model {detail}", _AWQ_ADVICE)

    unread = [own for own, other in _AUTOAWQ.items() if own in config and other not in config]
    if unread:
        feature = f"an AWQ model with AutoAWQ's keys in quantization_config ({', '.join(unread)})"
        raise refuse(feature, f"rename {RENAMING} in config.json")
    bits, group_size = config.get("bits", 4), config.get("group_size", 128)
    layout = str(config.get("version") or config.get("format") or "gemm").lower()
    require(bits == 4, f"of {bits} bits")
    require(layout == "gemm", f"in the layout {layout!r}; LMDeploy reads only 'gemm'")
    is_size = isinstance(group_size, int) and group_size > 0
    require(is_size, f"with group_size={group_size!r}; LMDeploy needs a positive whole number")
    require(config.get("zero_point", True), "without zero points, which LMDeploy always reads")
    has_experts = any(model.get(name) for name in EXPERTS)
    in_floats = (*_NEVER_PACKED, *(_ROUTERS if has_experts else ()))
    listed = config.get("modules_to_not_convert") or []
    unpacked = [name for name in listed if name.rpartition(".")[2] not in in_floats]
    require(not unpacked, f"with layers that are not packed ({', '.join(unpacked)})")
    for name in names if has_experts else ():
        require(name in SERVED, f"with experts of {name}; supported are {', '.join(SERVED)}")
    for name, size in linear_sizes(model).items():
        require(size % group_size == 0, f"whose {name}={size} is not a multiple of group_size={group_size}")


def _check_experts_alone(names: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    _require_class(names, EXPERTS_ALONE, f"{config.get(CONVERTED_FROM)} with only the experts quantised")


_IN_FLOATS = (
    *(f"self_attn.{name}" for name in "q_proj q_a_proj q_b_proj kv_a_proj_with_mqa o_proj".split()),
    "self_attn.fused_qkv_a_proj_with_mqa",
    *(f"mlp.{part}{name}" for part in ("", "shared_experts.") for name in ("gate_up_proj", "down_proj")),
)
"""LMDeploy's linear layers of Kimi-K2.5, all but the experts."""


def check_stored_experts(stored: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise UnsupportedFeatureError unless LMDeploy reads Kimi-K2.5's packed experts as they are stored.

    stored: the ``quantization_config``. model: the configuration of the language model.
    """
    from lmdeploy.pytorch.config import QuantizationConfig

    try:
        rules = QuantizationConfig.from_config(SimpleNamespace(quantization_config=stored))
    except ValueError as error:
        _require(False, str(error))
        raise
    for layer in range(model.get("num_hidden_layers") or 1):
        place = f"language_model.model.layers.{layer}."
        packed = [name for name in _IN_FLOATS if rules.get_quant_method(place + name)]
        shown = "".join(packed[:1])
        _require(not packed, f"compressed-tensors with layers quantised besides the experts ({shown})")
        experts = rules.get_quant_method(f"{place}mlp.experts", "moe")
        _require(experts, f"compressed-tensors with the experts of layer {layer} in floats")


CHECKS: dict[str, Callable[[Sequence[str], Mapping[str, Any], Mapping[str, Any]], None]] = {
    "awq": _check_awq,
    "smooth_quant": _check_smooth_quant,
    "fp8": _check_fp8,
    "compressed-tensors": _check_experts_alone,  # a checkpoint with other layers packed becomes another method
}
"""Quantisation method -> the function that checks its details. All other methods are refused."""
