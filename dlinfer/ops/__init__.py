"""The fused-op interface: the ops that frameworks and graphs can call.

``dlinfer.ops.<op>(...)`` for callers and ``torch.ops.dlinfer.<op>`` for graphs both dispatch to the active vendor of
the tensors' device. Parameter names, order and dimensions are LMDeploy's. The vendor chooses the KV cache's layout.
"""

from dlinfer.ops.activation.gated import gelu_mul, silu_mul
from dlinfer.ops.activation.silu_and_mul import silu_and_mul
from dlinfer.ops.attention.fill import fill_kv_cache
from dlinfer.ops.attention.paged_decode import paged_decode_attention
from dlinfer.ops.attention.paged_prefill import paged_prefill_attention
from dlinfer.ops.attention.prefill import prefill_attention
from dlinfer.ops.attention.quantised_decode import quantised_paged_decode_attention
from dlinfer.ops.attention.quantised_fill import fill_quantised_kv_cache
from dlinfer.ops.attention.quantised_prefill import quantised_paged_prefill_attention
from dlinfer.ops.attention.sparse import lightning_indexer, sparse_flash_attention
from dlinfer.ops.collective.all_reduce import all_reduce
from dlinfer.ops.compressed.attention import compressed_attention, compressed_indexer
from dlinfer.ops.compressed.windows import compress_windows
from dlinfer.ops.core import kernels
from dlinfer.ops.core.spec import OpSpec, Tolerance, registry
from dlinfer.ops.linear.dense import linear
from dlinfer.ops.linear.linears import linears
from dlinfer.ops.linear.lora import lora_linear
from dlinfer.ops.moe.bf12 import fused_moe_bf12
from dlinfer.ops.moe.clamped import fused_moe_clamped
from dlinfer.ops.moe.eight_bit import fused_moe_blocked_fp8, fused_moe_static_fp8, fused_moe_w8a8
from dlinfer.ops.moe.floating import fused_moe
from dlinfer.ops.moe.four_bit import fused_moe_w4a16
from dlinfer.ops.moe.gguf import fused_moe_gguf
from dlinfer.ops.moe.limited import fused_moe_limited, fused_moe_limited_mxfp4
from dlinfer.ops.moe.mxfp4 import fused_moe_mxfp4
from dlinfer.ops.moe.routing import moe_gating_topk_softmax
from dlinfer.ops.norm.rms_norm import add_rms_norm, rms_norm
from dlinfer.ops.norm.rms_norm_w8a8 import add_rms_norm_w8a8, rms_norm_w8a8
from dlinfer.ops.norm.sinkhorn import sinkhorn
from dlinfer.ops.quantised.dynamic_quant import dynamic_quant
from dlinfer.ops.quantised.embedding_bf12 import embedding_bf12
from dlinfer.ops.quantised.embedding_gguf import embedding_gguf
from dlinfer.ops.quantised.linear_bf12 import linear_bf12
from dlinfer.ops.quantised.linear_fp8 import linear_blocked_fp8, linear_static_fp8
from dlinfer.ops.quantised.linear_gguf import linear_gguf
from dlinfer.ops.quantised.linear_w8a8 import linear_w8a8, linear_w8a8_static
from dlinfer.ops.quantised.weight_quant import weight_quant_matmul
from dlinfer.ops.recurrent.causal_conv1d import causal_conv1d
from dlinfer.ops.recurrent.gated_delta_rule import gated_delta_rule
from dlinfer.ops.rotary.interleaved import apply_rotary_pos_emb_interleaved
from dlinfer.ops.rotary.rotate_half import apply_rotary_pos_emb

kernels.install()

__all__ = [
    "OpSpec",
    "Tolerance",
    "add_rms_norm",
    "add_rms_norm_w8a8",
    "all_reduce",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_interleaved",
    "causal_conv1d",
    "compress_windows",
    "compressed_attention",
    "compressed_indexer",
    "dynamic_quant",
    "embedding_bf12",
    "embedding_gguf",
    "fill_kv_cache",
    "fill_quantised_kv_cache",
    "fused_moe",
    "fused_moe_bf12",
    "fused_moe_blocked_fp8",
    "fused_moe_clamped",
    "fused_moe_gguf",
    "fused_moe_limited",
    "fused_moe_limited_mxfp4",
    "fused_moe_mxfp4",
    "fused_moe_static_fp8",
    "fused_moe_w4a16",
    "fused_moe_w8a8",
    "gated_delta_rule",
    "gelu_mul",
    "lightning_indexer",
    "linear",
    "linear_bf12",
    "linear_blocked_fp8",
    "linear_gguf",
    "linear_static_fp8",
    "linear_w8a8",
    "linear_w8a8_static",
    "linears",
    "lora_linear",
    "moe_gating_topk_softmax",
    "paged_decode_attention",
    "paged_prefill_attention",
    "prefill_attention",
    "quantised_paged_decode_attention",
    "quantised_paged_prefill_attention",
    "registry",
    "rms_norm",
    "rms_norm_w8a8",
    "silu_and_mul",
    "silu_mul",
    "sinkhorn",
    "sparse_flash_attention",
    "weight_quant_matmul",
]
