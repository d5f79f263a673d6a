"""The kernels of the cpu vendor: C++ for a decoder's layers, vectorised torch for the rest.

Decode has no Python loop over sequences or experts. The KV cache has the default layout,
[blocks, block_size, kv_heads, head_size], with any strides.
"""

from dlinfer.vendor.base import Kernel
from dlinfer.vendor.cpu.attention.decode import (
    paged_decode_attention,
    quantised_paged_decode_attention,
)
from dlinfer.vendor.cpu.attention.kv_cache import fill_kv_cache, fill_quantised_kv_cache
from dlinfer.vendor.cpu.attention.prefill import (
    paged_prefill_attention,
    prefill_attention,
    quantised_paged_prefill_attention,
)
from dlinfer.vendor.cpu.bf12.experts import fused_moe_bf12
from dlinfer.vendor.cpu.bf12.matrices import embedding_bf12, linear_bf12
from dlinfer.vendor.cpu.eight_bit.experts import (
    fused_moe_blocked_fp8,
    fused_moe_static_fp8,
    fused_moe_w8a8,
)
from dlinfer.vendor.cpu.eight_bit.linears import (
    linear_blocked_fp8,
    linear_static_fp8,
    linear_w8a8,
    linear_w8a8_static,
)
from dlinfer.vendor.cpu.eight_bit.rows import add_rms_norm_w8a8, dynamic_quant, rms_norm_w8a8
from dlinfer.vendor.cpu.elementwise import (
    add_rms_norm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleaved,
    linear,
    rms_norm,
    silu_and_mul,
)
from dlinfer.vendor.cpu.four_bit.experts import fused_moe_mxfp4, fused_moe_w4a16
from dlinfer.vendor.cpu.four_bit.linears import weight_quant_matmul
from dlinfer.vendor.cpu.gated import gelu_mul, silu_mul
from dlinfer.vendor.cpu.linears import linears
from dlinfer.vendor.cpu.lora import lora_linear
from dlinfer.vendor.cpu.moe import fused_moe, fused_moe_clamped, moe_gating_topk_softmax
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
        weight_quant_matmul,
        linear_bf12,
        embedding_bf12,
        lora_linear,
        fill_kv_cache,
        prefill_attention,
        paged_prefill_attention,
        paged_decode_attention,
        fill_quantised_kv_cache,
        quantised_paged_prefill_attention,
        quantised_paged_decode_attention,
        moe_gating_topk_softmax,
        fused_moe,
        dynamic_quant,
        rms_norm_w8a8,
        add_rms_norm_w8a8,
        linear_w8a8,
        linear_w8a8_static,
        linear_blocked_fp8,
        linear_static_fp8,
        fused_moe_w8a8,
        fused_moe_blocked_fp8,
        fused_moe_static_fp8,
        fused_moe_clamped,
        fused_moe_bf12,
        fused_moe_w4a16,
        fused_moe_mxfp4,
        causal_conv1d,
        gated_delta_rule,
        lightning_indexer,
        sparse_flash_attention,
    )
}
