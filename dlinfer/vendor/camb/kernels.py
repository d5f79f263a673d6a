"""The table of ops and their kernels. An op that is missing here runs on its reference, counted as a fallback."""

import torch

from dlinfer.vendor.base import Kernel
from dlinfer.vendor.camb.attention.decode import paged_decode_attention
from dlinfer.vendor.camb.attention.prefill import paged_prefill_attention, prefill_attention
from dlinfer.vendor.camb.linears import linear, linear_w8a8
from dlinfer.vendor.camb.moe import fused_moe, fused_moe_w8a8, moe_gating_topk_softmax
from dlinfer.vendor.camb.norms import (
    add_rms_norm,
    add_rms_norm_w8a8,
    dynamic_quant,
    rms_norm,
    rms_norm_w8a8,
)
from dlinfer.vendor.camb.pointwise import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleaved,
    silu_and_mul,
)
from dlinfer.vendor.camb.slots import fill_kv_cache
from dlinfer.vendor.claims import Claim, Claims

IN_FULL = (
    rms_norm,
    add_rms_norm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleaved,
    silu_and_mul,
    linear,
    moe_gating_topk_softmax,
    fused_moe,
)
"""Kernels that take every call with float16, bfloat16 or float32."""

IN_PART = (
    rms_norm_w8a8,
    add_rms_norm_w8a8,
    dynamic_quant,
    fill_kv_cache,
    prefill_attention,
    paged_prefill_attention,
    paged_decode_attention,
)
IN_PART_HALVES = (linear_w8a8, fused_moe_w8a8)
"""Kernels that decline all calls with float32, and some with float16 and bfloat16."""

KERNELS: dict[str, Kernel] = {kernel.__name__: kernel for kernel in (*IN_FULL, *IN_PART, *IN_PART_HALVES)}

CLAIMS: Claims = {
    **{kernel.__name__: Claim() for kernel in IN_FULL},
    **{kernel.__name__: Claim(in_part=True) for kernel in IN_PART},
    **{kernel.__name__: Claim((torch.float16, torch.bfloat16), in_part=True) for kernel in IN_PART_HALVES},
}
