"""The indexer of DeepSeek's sparse attention: it chooses the tokens that each new token attends to.

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
    """For each new token, scores all cached tokens of the same sequence and chooses the best.

    The indexer's cache has the model's dtype, so that scores are as in transformers. LMDeploy's CUDA layer rounds
    queries and keys to FP8.
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        # The model's dtype. The build spec lacks it, so the layer's owner sets it.
        self.dtype: torch.dtype | None = None

    @classmethod
    def from_spec(cls, spec: Any) -> "Indexer":
        """Build the layer of an NSAIndexFP8BuildSpec. Raises UnsupportedFeatureError for a ``fill`` other than -1.

        The spec's ``block_size`` is for FP8 rounding, and is not used.
        """
        if spec.fill != -1:
            raise refuse(f"sparse attention with fill={spec.fill}", "use fill=-1")
        return cls(spec.top_k)

    def get_block_cache_requests(
        self, geometry: BlockCacheGeometry, head_dim: int
    ) -> tuple[BlockCacheRequest, ...]:
        """Request one cache of keys in the model's dtype and the vendor's layout: ``head_dim`` numbers per token."""
        assert self.dtype is not None, "the owner of the layer sets it"
        layout = cache_blocks.layout(activation.torch_device())
        shape = layout.shape(1, geometry.kernel_block_size, 1, head_dim)[1:]
        own = {"name": DSA_INDEXER_K_CACHE_NAME, "shape": shape, "dtype": self.dtype}
        return (BlockCacheRequest(**own, per_row_contiguous=True),)

    def get_step_metadata(self, attn_metadata: Any) -> Any:
        """Return attn_metadata itself. It has all that an indexer reads (see ``attention.step_metadata``)."""
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
        """Return for each new token the positions to attend to: int32 [N, top_k], in ascending order, padded with -1.

        q: [N, heads, D], rotated. k: [N, D], normed and rotated. weights: [N, heads], one of each head; converted to
        q's dtype. indexer_k_cache: of q's dtype, in the vendor's layout, one head of D numbers; k is written into it.
        meta: the result of ``get_step_metadata``; None means attn_metadata.
        """
        step = self.get_step_metadata(attn_metadata) if meta is None else meta
        keys, cache = k[:, None], indexer_k_cache
        # The op writes keys and values; an indexer has no values.
        ops.fill_kv_cache(keys, keys[..., :0], cache, cache[..., :0], step.kv_start_indices)
        # The scores' scale is left out: it would round weights of 16 bits once more. It is above zero and the same for
        # all of a token's positions, so it changes no order.
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
        """Norm k, rotate q and k, and return the result of ``forward``. q, k: from the projections.

        norm_weight, norm_bias: [D], of a LayerNorm with ``norm_eps``. cos, sin: [N, R], two equal halves. The first R
        numbers of a head are rotated, as two halves, or in pairs if ``rope_interleaved``. head_gate_scale: a positive
        factor of the weights; not used, since it changes no order. Norm and rotation are computed in float32 and
        rounded once to q's dtype.

        DeepSeek's and LMDeploy's code also multiplies q and k by an orthogonal Hadamard matrix, to spread large numbers
        before FP8 rounding. There is no rounding here, and the matrix does not change the products of q and k.
        """
        affine = (norm_weight.float(), norm_bias.float())
        normed = functional.layer_norm(k.float(), k.shape[-1:], *affine, norm_eps)
        heads = (q.float(), normed[:, None])
        turned_q, turned_k = (rotated(x, cos, sin, rope_interleaved).to(q.dtype) for x in heads)
        return self.forward(turned_q, turned_k[:, 0], weights, indexer_k_cache, attn_metadata, meta)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, in_pairs: bool) -> Tensor:
    """Return x, float32 [N, heads, D], with the first R numbers of each head rotated.

    cos, sin: [N, R], two equal halves each. in_pairs: whether numbers (2i, 2i + 1) form a pair. The rotated pair is
    returned at i and R / 2 + i, as in transformers. That changes no product of q and k, since both are reordered.
    Source: RoFormer (Su et al., 2021, arXiv:2104.09864).
    """
    size = cos.shape[-1]
    half = size // 2
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()
    turned, kept = x[..., :size], x[..., size:]
    halves = (turned[..., :half], turned[..., half:])
    first, second = (turned[..., ::2], turned[..., 1::2]) if in_pairs else halves
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1)
