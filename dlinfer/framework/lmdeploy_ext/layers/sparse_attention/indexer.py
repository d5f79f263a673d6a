"""The indexer of DeepSeek's sparse attention: which tokens of its sequence each new token attends to.

Source: DeepSeek-V3.2 (2025, arXiv:2512.02556), section 2.1, as transformers' DeepseekV32Indexer computes it.
"""

from typing import Any

import torch
from lmdeploy.pytorch.backends.nsa import NSAIndexFP8Impl
from lmdeploy.pytorch.consts import DSA_INDEXER_K_CACHE_NAME
from lmdeploy.pytorch.engine.cache_engine.schema import BlockCacheGeometry, BlockCacheRequest
from torch import Tensor
from torch.nn import functional

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device import activation, cache_blocks
from dlinfer.framework.lmdeploy_ext.device.activation import refuse


class Indexer(NSAIndexFP8Impl):
    """Scores all cached tokens for each new one, and chooses the best.

    Its cache has the model's dtype, where LMDeploy's CUDA layer rounds queries and keys to FP8: scores are those of the
    model's own numbers, as transformers has them.
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        # The model's, which no build spec has: the layer's owner sets it.
        self.dtype: torch.dtype | None = None

    @classmethod
    def from_spec(cls, spec: Any) -> "Indexer":
        """From LMDeploy's NSAIndexFP8BuildSpec. Raises UnsupportedFeatureError for what the op does not give.

        ``block_size`` is of FP8 rounding. A short prefill is scored like any other: attention to all that was chosen is
        attention to all.
        """
        if spec.fill != -1:
            raise refuse(f"sparse attention whose places without a token hold {spec.fill}", "use fill=-1")
        return cls(spec.top_k)

    def get_block_cache_requests(
        self, geometry: BlockCacheGeometry, head_dim: int
    ) -> tuple[BlockCacheRequest, ...]:
        """One cache of keys, a head of ``head_dim`` numbers a token, in the model's dtype and the vendor's layout."""
        assert self.dtype is not None, "the owner of the layer sets it"
        layout = cache_blocks.layout(activation.torch_device())
        shape = layout.shape(1, geometry.kernel_block_size, 1, head_dim)[1:]
        own = {"name": DSA_INDEXER_K_CACHE_NAME, "shape": shape, "dtype": self.dtype}
        return (BlockCacheRequest(**own, per_row_contiguous=True),)

    def get_step_metadata(self, attn_metadata: Any) -> Any:
        """The step's metadata of ``attention.step_metadata``, which has all that an indexer reads."""
        return attn_metadata

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        indexer_k_cache: Tensor,
        attn_metadata: Any = None,
        meta: Any = None,
    ) -> Tensor:
        """Which positions of its sequence each new token attends to: int32 [N, top_k], rising, then -1.

        q: [N, heads, D], k: [N, D], rotated, k normed. weights: [N, heads], of the heads. indexer_k_cache: in the
        vendor's layout, one head of D; k is written into it. All of one dtype, but for weights, which are converted.
        meta: of ``get_step_metadata``; made of attn_metadata where it is None.
        """
        step = self.get_step_metadata(attn_metadata) if meta is None else meta
        keys, cache = k[:, None], indexer_k_cache
        # The op writes keys and values; an indexer has no values.
        ops.fill_kv_cache(keys, keys[..., :0], cache, cache[..., :0], step.kv_start_indices)
        # The scores' scale is above zero and the same for all of a token's positions. It changes no order, and without
        # it weights of 16 bits are not rounded once more.
        sequences = (step.cu_seqlens_q_cpu[1:], step.kv_seqlens_cpu, step.block_offsets)
        return ops.lightning_indexer(q, cache, weights.to(q.dtype), *sequences, self.top_k)[:, 0]

    def forward_fused(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        cos: Tensor,
        sin: Tensor,
        indexer_k_cache: Tensor,
        norm_eps: float,
        head_gate_scale: float,
        rope_interleaved: bool,
        attn_metadata: Any = None,
        meta: Any = None,
    ) -> Tensor:
        """As ``forward``, of q and k as they are projected: k is normed, and both are rotated.

        norm_weight, norm_bias: [D], of a LayerNorm with ``norm_eps``. cos, sin: [N, R], both halves alike; the first R
        numbers of a head are rotated, as two halves or, ``rope_interleaved``, in pairs. head_gate_scale: of weights,
        above zero. Computed in float32 and rounded once to q's dtype.

        DeepSeek's own code and LMDeploy's turn q and k by a Hadamard matrix then. That is orthogonal, so it leaves
        their products as they are; it only spreads large numbers out before FP8 rounds them, which nothing does here.
        """
        affine = (norm_weight.float(), norm_bias.float())
        normed = functional.layer_norm(k.float(), k.shape[-1:], *affine, norm_eps)
        heads = (q.float(), normed[:, None])
        turned_q, turned_k = (rotated(x, cos, sin, rope_interleaved).to(q.dtype) for x in heads)
        return self.forward(turned_q, turned_k[:, 0], weights, indexer_k_cache, attn_metadata, meta)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, in_pairs: bool) -> Tensor:
    """x [N, heads, D], float32, its first R numbers rotated by cos and sin [N, R]. Both halves of these are alike.

    Pairs (2i, 2i + 1) come out as numbers i and R / 2 + i, as in transformers: where q and k both do, products are the
    same. Source: RoFormer (Su et al., 2021, arXiv:2104.09864).
    """
    size = cos.shape[-1]
    half = size // 2
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()
    turned, kept = x[..., :size], x[..., size:]
    halves = (turned[..., :half], turned[..., half:])
    first, second = (turned[..., ::2], turned[..., 1::2]) if in_pairs else halves
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1)
