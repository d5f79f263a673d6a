"""The table of ops and their kernels. An op missing here runs on its reference, if the fallback policy allows it."""

from dlinfer.vendor.ascend.attention.decode import paged_decode_attention
from dlinfer.vendor.ascend.attention.prefill import paged_prefill_attention, prefill_attention
from dlinfer.vendor.ascend.attention.sparse import lightning_indexer, sparse_flash_attention
from dlinfer.vendor.ascend.linears import (
    all_reduce,
    linear,
    linear_w8a8,
    linear_w8a8_static,
    weight_quant_matmul,
)
from dlinfer.vendor.ascend.moe.experts import fused_moe, fused_moe_w8a8, moe_gating_topk_softmax
from dlinfer.vendor.ascend.norms import (
    add_rms_norm,
    add_rms_norm_w8a8,
    dynamic_quant,
    rms_norm,
    rms_norm_w8a8,
)
from dlinfer.vendor.ascend.pointwise import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleaved,
    silu_and_mul,
)
from dlinfer.vendor.ascend.slots import fill_kv_cache
from dlinfer.vendor.base import Kernel

KERNELS: dict[str, Kernel] = {
    kernel.__name__: kernel
    for kernel in (
        all_reduce,
        rms_norm,
        add_rms_norm,
        rms_norm_w8a8,
        add_rms_norm_w8a8,
        dynamic_quant,
        apply_rotary_pos_emb,
        apply_rotary_pos_emb_interleaved,
        silu_and_mul,
        linear,
        linear_w8a8,
        linear_w8a8_static,
        weight_quant_matmul,
        fill_kv_cache,
        prefill_attention,
        paged_prefill_attention,
        paged_decode_attention,
        moe_gating_topk_softmax,
        fused_moe,
        fused_moe_w8a8,
        lightning_indexer,
        sparse_flash_attention,
    )
}
