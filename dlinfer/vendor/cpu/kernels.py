"""Kernels of the cpu vendor: vectorised torch, without a Python loop over sequences or experts in decode.

The KV cache is [blocks, block_size, kv_heads, head_size], the vendor's (default) layout, with any strides.
"""

from dlinfer.vendor.base import Kernel
from dlinfer.vendor.cpu.decode import paged_decode_attention
from dlinfer.vendor.cpu.elementwise import (
    add_rms_norm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleaved,
    linear,
    rms_norm,
    silu_and_mul,
)
from dlinfer.vendor.cpu.gated import gelu_mul, silu_mul
from dlinfer.vendor.cpu.kv_cache import fill_kv_cache
from dlinfer.vendor.cpu.linears import linears
from dlinfer.vendor.cpu.lora import lora_linear
from dlinfer.vendor.cpu.moe import fused_moe, fused_moe_clamped, moe_gating_topk_softmax
from dlinfer.vendor.cpu.prefill import paged_prefill_attention, prefill_attention
from dlinfer.vendor.cpu.recurrent.causal_conv1d import causal_conv1d
from dlinfer.vendor.cpu.recurrent.gated_delta_rule import gated_delta_rule
from dlinfer.vendor.cpu.sparse.attention import lightning_indexer, sparse_flash_attention

KERNELS: dict[str, Kernel] = {
    kernel.__name__: kernel
    for kernel in (
        rms_norm,
        add_rms_norm,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_interleaved,
        silu_and_mul,
        silu_mul,
        gelu_mul,
        linear,
        linears,
        lora_linear,
        fill_kv_cache,
        prefill_attention,
        paged_prefill_attention,
        paged_decode_attention,
        moe_gating_topk_softmax,
        fused_moe,
        fused_moe_clamped,
        causal_conv1d,
        gated_delta_rule,
        lightning_indexer,
        sparse_flash_attention,
    )
}
