"""The table of ops and their kernels. An op missing here runs on its reference, if the fallback policy allows it."""

from dlinfer.vendor.base import Kernel
from dlinfer.vendor.maca.attention import (
    paged_decode_attention,
    paged_prefill_attention,
    prefill_attention,
)
from dlinfer.vendor.maca.caches import fill_kv_cache
from dlinfer.vendor.maca.linears import linear, linear_w8a8, weight_quant_matmul
from dlinfer.vendor.maca.moe.experts import fused_moe, moe_gating_topk_softmax
from dlinfer.vendor.maca.norms import (
    add_rms_norm,
    add_rms_norm_w8a8,
    dynamic_quant,
    rms_norm,
    rms_norm_w8a8,
)
from dlinfer.vendor.maca.pointwise import apply_rotary_pos_emb, silu_and_mul

KERNELS: dict[str, Kernel] = {
    kernel.__name__: kernel
    for kernel in (
        rms_norm,
        add_rms_norm,
        rms_norm_w8a8,
        add_rms_norm_w8a8,
        dynamic_quant,
        apply_rotary_pos_emb,
        silu_and_mul,
        linear,
        linear_w8a8,
        weight_quant_matmul,
        fill_kv_cache,
        prefill_attention,
        paged_prefill_attention,
        paged_decode_attention,
        moe_gating_topk_softmax,
        fused_moe,
    )
}

IN_HALVES = (
    "prefill_attention",
    "paged_prefill_attention",
    "paged_decode_attention",
    "fused_moe",
    "linear_w8a8",
    "weight_quant_matmul",
)
"""Ops that take or return only float16 and bfloat16. All other ops also take float32."""
