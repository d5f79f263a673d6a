"""Where LMDeploy makes layers of experts: those of 4 bits, which it has for compressed-tensors on CUDA alone.

This file loads before LMDeploy's modules do, since it patches them. Our layer is in ``packed_experts.py``.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.patching import Original, replaces

_in_mxfp4: ContextVar[bool] = ContextVar("in_mxfp4", default=False)
"""Whether the layer of experts that is being made is GPT-OSS's, of a checkpoint in MXFP4."""


FEATURE = "quantised experts"
_LAYER = "lmdeploy.pytorch.nn.moe.compressed_tensors:FusedMoEW4A16"


@replaces(
    "lmdeploy.pytorch.nn.moe:build_fused_moe",
    why="has no layer of experts for AWQ, which GPTQ and compressed-tensors become",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _build_fused_moe(
    original: Original,
    hidden_dim: int,
    ffn_dim: int,
    num_experts: int,
    top_k: int,
    bias: bool = False,
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    all_reduce: bool = True,
    enable_ep: bool = False,
    quant_config: Any = None,
    layer_idx: int = 0,
    act_func: Callable[..., Any] | None = None,
    prefix: str = "",
) -> Any:
    """Our layer where the checkpoint is AWQ's, though LMDeploy's class may have left out to say so."""
    if _in_mxfp4.get():
        from dlinfer.framework.lmdeploy_ext.layers.moe.mxfp4_experts import Mxfp4Experts

        sizes = (hidden_dim, ffn_dim, num_experts)
        return Mxfp4Experts(*sizes, dtype=dtype, device=device, act_func=act_func)
    quantised = _of_checkpoint()
    if quantised is None or quantised.quant_method != "awq":
        sizes, given = (hidden_dim, ffn_dim, num_experts, top_k), (bias, renormalize, dtype, device)
        rest = (all_reduce, enable_ep, quant_config, layer_idx, act_func, prefix)
        return original(*sizes, *given, *rest)
    if bias or act_func is not None:
        raise refuse("packed experts with biases or an activation of their own", "use another model")
    from dlinfer.framework.lmdeploy_ext.layers.moe.packed_experts import PackedExperts

    return PackedExperts(
        hidden_dim,
        ffn_dim,
        num_experts,
        top_k,
        renormalize=renormalize,
        group_size=quantised.group_size,
        device=device,
    )


def _of_checkpoint() -> Any:
    """LMDeploy's QuantizationConfig of the model that is being built, or None."""
    from lmdeploy.pytorch.models.patch import get_build_model_context

    return get_build_model_context().quant_config


@replaces(
    "lmdeploy.pytorch.models.gpt_oss:GptOssExperts.__init__",
    why="makes experts of floats, whatever the checkpoint has",
    for_models=("gpt_oss",),
)
def _gpt_oss_experts(
    original: Original,
    self: Any,
    config: Any,
    layer_idx: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    token = _in_mxfp4.set(getattr(config, "experts_packed_as", None) == "mxfp4")
    try:
        original(self, config, layer_idx, dtype, device)
    finally:
        _in_mxfp4.reset(token)


@replaces(
    f"{_LAYER}.__init__",
    why="takes activations of 16 bits alone, as its kernels for CUDA do",
    when=activation.is_on,
    signature="(self, hidden_dim, ffn_dim, num_experts, top_k, renormalize=False, dtype=None, device=None, "
    "all_reduce=True, num_bits=4, group_size=32, layer_idx=0)",
    for_feature=FEATURE,
)
def _of_any_dtype(original: Original, self: Any, *args: Any, **options: Any) -> None:
    given = options.get("dtype")
    if given is not torch.float32:
        original(self, *args, **options)
        return
    original(self, *args, **options | {"dtype": torch.bfloat16})  # which no parameter has
    self.dtype = given


@replaces(
    f"{_LAYER}.update_weights",
    why="leaves words along in_features, where the op reads words along out_features",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _to_awq(original: Original, self: Any) -> None:
    original(self)
    for part in (self.gate_up, self.down):
        _repack(part)


def _repack(part: Any) -> None:
    """Turn compressed-tensors' words [experts, out, in / 8] and scales [experts, out, groups] into AWQ's, in place.

    Both take the same memory, so that one expert at a time has a copy. Later calls do nothing.
    """
    from dlinfer.ops.quantised.packing import AWQ, GPTQ

    if getattr(part, "lies_as_awq", False):
        return
    along_inputs = replace(GPTQ, zero_bias=0)
    words, scales = part.weight_packed.data, part.weight_scale.data
    experts, out, _ = words.shape
    made_words = words.view(experts, words.shape[2] * AWQ.per_word, out // AWQ.per_word)
    made_scales = scales.view(experts, scales.shape[2], out)
    for expert in range(experts):
        made_words[expert] = along_inputs.repack(words[expert].t(), AWQ)
        made_scales[expert] = scales[expert].t().contiguous()
    part.weight_packed.data, part.weight_scale.data, part.lies_as_awq = made_words, made_scales, True
