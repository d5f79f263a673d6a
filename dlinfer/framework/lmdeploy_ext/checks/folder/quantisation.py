"""Which quantised checkpoints are served on our devices, told from ``quantization_config``.

LMDeploy takes what it does not know for something else: every FP8 model that is not static for one with blocks of 128.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.folder.awq import check_awq
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM
from dlinfer.framework.lmdeploy_ext.conversion.plan import plan_of
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse

BLOCK = 128
"""Rows and columns of a block: LMDeploy's classes have no other."""

ADVICE = "use the unquantised model in bfloat16 or float32"

W8A8_SERVED = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "InternLM2ForCausalLM",
    "InternLM3ForCausalLM",
    "Phi3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
)
"""Classes of LMDeploy's whose quantised norms feed linear layers only. Others quantise norms of heads or of results
too, and then use them as if they were not."""

_FLOATS = "its attention reads floats alone"
_JOINED = "LMDeploy joins its projections, and their tokens were never compared"

FLOATS_ALONE = {
    "PhiMoEForCausalLM": _FLOATS,
    "MiniCPM3ForCausalLM": _FLOATS,
    "DeepseekV32ForCausalLM": _JOINED,
    "GlmMoeDsaForCausalLM": _JOINED,
}
"""Classes of LMDeploy's that are served in floats alone -> why."""


EXPERTS_ALONE = ("Qwen3MoeForCausalLM",)
"""Classes of LMDeploy's that say which layer they build, so that experts may be packed and other layers in floats."""


def check(names: Sequence[str], found: Any, model: Mapping[str, Any], is_inside: bool = False) -> None:
    """Raise UnsupportedFeatureError for a quantisation that is not served.

    names: the architectures of the model. found: its ``quantization_config``. model: its whole configuration, which
    ``is_inside`` that of another model.
    """
    config = found if isinstance(found, Mapping) else {}
    method = str(config.get("quant_method", "unknown"))
    plan = plan_of(config, model)
    if plan is not None:
        if is_inside:
            raise refuse(f"a quantised model ({method} inside another model)", ADVICE)
        if plan.config is None:
            return
        config, method = plan.config, str(plan.config["quant_method"])
    if method not in CHECKS:
        raise refuse(f"a quantised model ({method})", ADVICE)
    for name in names:
        if name in FLOATS_ALONE:
            raise refuse(f"a quantised {name} ({method}; {FLOATS_ALONE[name]})", ADVICE)
    CHECKS[method](names, config, model)


def _check_smooth_quant(names: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    dtype = config.get("quant_dtype") or "int8"
    if dtype not in ("int8", "float8_e4m3fn"):
        raise refuse(f"a quantised model (smooth_quant with quant_dtype {dtype})", ADVICE)
    for name in names:
        if name not in W8A8_SERVED:
            served, method = ", ".join(W8A8_SERVED), config.get(CONVERTED_FROM, "smooth_quant")
            raise refuse(f"a quantised {name} ({method}; served are {served})", ADVICE)


def _check_fp8(names: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    fmt, scale_fmt = config.get("fmt", "e4m3"), config.get("scale_fmt")
    if fmt != "e4m3":
        raise refuse(f"a quantised model (fp8 with fmt {fmt})", ADVICE)
    if scale_fmt not in (None, "ue8m0"):
        raise refuse(f"a quantised model (fp8 with scale_fmt {scale_fmt})", ADVICE)
    block = config.get("weight_block_size")
    if block is None and config.get("activation_scheme") != "static":
        what = "fp8 with scales of whole tensors and activations scaled as they come"
        raise refuse(f"a quantised model ({what})", ADVICE)
    if block is None:
        return
    if list(block) != [BLOCK, BLOCK]:
        what = f"fp8 with weight_block_size {list(block)}"
        raise refuse(f"a quantised model ({what})", f"use blocks of [{BLOCK}, {BLOCK}]")
    for name, size in _joined_sizes(model):
        if size % BLOCK:
            what = f"{config.get(CONVERTED_FROM, 'fp8')} in blocks of {BLOCK}, of which {name} = {size} is no multiple"
            raise refuse(f"a quantised model ({what})", ADVICE)


def _joined_sizes(model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Rows of layers that LMDeploy joins, q, k and v, and gate and up: it joins their blocks, which must be whole."""
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if model.get(name):
            yield name, model[name]
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    if heads and hidden and not model.get("kv_lora_rank"):  # latent attention joins nothing
        size = model.get("head_dim") or hidden // heads
        yield "num_attention_heads * head_dim", heads * size
        yield "num_key_value_heads * head_dim", (model.get("num_key_value_heads") or heads) * size


def _check_experts_alone(names: Sequence[str], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    for name in names:
        if name not in EXPERTS_ALONE:
            served = ", ".join(EXPERTS_ALONE)
            what = f"{config.get(CONVERTED_FROM)} with experts alone; served are {served}"
            raise refuse(f"a quantised {name} ({what})", ADVICE)


CHECKS: dict[str, Callable[[Sequence[str], Mapping[str, Any], Mapping[str, Any]], None]] = {
    "awq": check_awq,
    "smooth_quant": _check_smooth_quant,
    "fp8": _check_fp8,
    "compressed-tensors": _check_experts_alone,  # what others of it become is checked as that
}
"""Method -> what is refused of it. Every other method is refused whole."""
