"""Patches that let LMDeploy make layers of 4-bit experts. LMDeploy makes them only for compressed-tensors on CUDA.

This file is imported before LMDeploy's modules. The layers are in ``packed_experts.py`` and ``mxfp4_experts.py``.
"""

import inspect
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.patching import Original, replaces

_in_mxfp4: ContextVar[bool] = ContextVar("in_mxfp4", default=False)
"""True while GPT-OSS's layer of experts is built for a checkpoint in MXFP4."""

FEATURE = "quantised experts"
_LAYER = "lmdeploy.pytorch.nn.moe.compressed_tensors:FusedMoEW4A16"


@replaces(
    "lmdeploy.pytorch.nn.moe:build_fused_moe",
    why="has no layer of experts for AWQ, the method that GPTQ and compressed-tensors are converted to",
    when=activation.is_on,
    signature="(hidden_dim, ffn_dim, num_experts, top_k, bias=False, renormalize=False, dtype=None, device=None, "
    "all_reduce=True, enable_ep=False, quant_config=None, layer_idx=0, act_func=None, prefix='')",
    for_feature=FEATURE,
)
def _build_fused_moe(original: Original, *args: Any, **options: Any) -> Any:
    """Return our layer for a checkpoint in AWQ or MXFP4, and LMDeploy's layer for other checkpoints.

    The build context says whether the checkpoint is in AWQ, because LMDeploy's model classes may leave ``quant_config``
    out.
    """
    from lmdeploy.pytorch.models.patch import get_build_model_context

    call = inspect.signature(original).bind(*args, **options)
    call.apply_defaults()
    asked = SimpleNamespace(**call.arguments)
    sizes = (asked.hidden_dim, asked.ffn_dim, asked.num_experts)
    if _in_mxfp4.get():
        from dlinfer.framework.lmdeploy_ext.layers.moe.mxfp4_experts import mxfp4_experts

        return mxfp4_experts(*sizes, asked.dtype, asked.device, asked.act_func)
    quantised: Any = get_build_model_context().quant_config
    if quantised is None or quantised.quant_method != "awq":
        return original(*args, **options)
    if asked.bias or asked.act_func is not None:
        raise refuse("packed experts with biases or an unusual activation", "use another model")
    from dlinfer.framework.lmdeploy_ext.layers.moe.packed_experts import packed_experts

    router = (asked.top_k, asked.renormalize)
    return packed_experts(*sizes, *router, quantised.group_size, asked.device, asked.all_reduce)


@replaces(
    "lmdeploy.pytorch.models.gpt_oss:GptOssExperts.__init__",
    why="builds experts in floats, whatever format the checkpoint has",
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
    why="accepts only activations of 16 bits, as its CUDA kernels do",
    when=activation.is_on,
    signature="(self, hidden_dim, ffn_dim, num_experts, top_k, renormalize=False, dtype=None, device=None, "
    "all_reduce=True, num_bits=4, group_size=32, layer_idx=0)",
    for_feature=FEATURE,
)
def _of_any_dtype(original: Original, self: Any, *args: Any, **options: Any) -> None:
    is_wide = options.get("dtype") is torch.float32
    original(self, *args, **options | ({"dtype": torch.bfloat16} if is_wide else {}))  # no parameter has it
    if is_wide:
        self.dtype = torch.float32


@replaces(
    f"{_LAYER}.update_weights",
    why="leaves weights packed along in_features, but the device's op reads them packed along out_features",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _to_awq(original: Original, self: Any) -> None:
    original(self)
    for part in (self.gate_up, self.down):
        _repack(part)


def _repack(part: Any) -> None:
    """Repack the weights of compressed-tensors in AWQ's layout, in place. A second call does nothing.

    part: has words [experts, out, in / 8] and scales [experts, out, groups]. Both layouts take the same memory, so only
    a copy of one expert is needed at a time.
    """
    from dlinfer.ops.quantised.packing import AWQ, GPTQ

    if getattr(part, "lies_as_awq", False):
        return
    along_inputs = replace(GPTQ, zero_bias=0)
    experts, out, columns = part.weight_packed.shape
    words = part.weight_packed.data.view(experts, columns * AWQ.per_word, out // AWQ.per_word)
    scales = part.weight_scale.data.view(experts, -1, out)
    for expert in range(experts):
        words[expert] = along_inputs.repack(part.weight_packed.data[expert].t(), AWQ)
        scales[expert] = part.weight_scale.data[expert].t().clone()  # of one group t() is contiguous already
    part.weight_packed.data, part.weight_scale.data, part.lies_as_awq = words, scales, True
