"""WHAT can be asked: the fused-op interface.

Each op is ``dlinfer.ops.<op>(...)`` for callers and ``torch.ops.dlinfer.<op>`` for graphs. Both dispatch to
the active vendor of the tensors' device. Parameter names, order and dimensions are LMDeploy's; the data
layout of the KV cache is the vendor's choice.
"""

from dlinfer.ops import kernels
from dlinfer.ops.activation import silu_and_mul
from dlinfer.ops.causal_conv1d import causal_conv1d
from dlinfer.ops.gated import gelu_mul, silu_mul
from dlinfer.ops.gated_delta_rule import gated_delta_rule
from dlinfer.ops.kv_cache import fill_kv_cache
from dlinfer.ops.linear import linear
from dlinfer.ops.linears import linears
from dlinfer.ops.lora import lora_linear
from dlinfer.ops.moe import fused_moe, moe_gating_topk_softmax
from dlinfer.ops.moe_clamped import fused_moe_clamped
from dlinfer.ops.norm import add_rms_norm, rms_norm
from dlinfer.ops.paged_decode import paged_decode_attention
from dlinfer.ops.paged_prefill import paged_prefill_attention
from dlinfer.ops.prefill import prefill_attention
from dlinfer.ops.rotary import apply_rotary_pos_emb
from dlinfer.ops.rotary_interleaved import apply_rotary_pos_emb_interleaved
from dlinfer.ops.sparse_attention import lightning_indexer, sparse_flash_attention
from dlinfer.ops.spec import OpSpec, Tolerance, registry

kernels.install()

__all__ = [
    "OpSpec",
    "Tolerance",
    "add_rms_norm",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_interleaved",
    "causal_conv1d",
    "fill_kv_cache",
    "fused_moe",
    "fused_moe_clamped",
    "gated_delta_rule",
    "gelu_mul",
    "lightning_indexer",
    "linear",
    "linears",
    "lora_linear",
    "moe_gating_topk_softmax",
    "paged_decode_attention",
    "paged_prefill_attention",
    "prefill_attention",
    "registry",
    "rms_norm",
    "silu_and_mul",
    "silu_mul",
    "sparse_flash_attention",
]
