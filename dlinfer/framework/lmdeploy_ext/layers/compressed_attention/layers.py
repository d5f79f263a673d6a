"""DeepSeek-V4's layers that LMDeploy has only for CUDA.

LMDeploy's CUDA layers keep keys in FP8, rotate the indexer's queries and keys by a Hadamard matrix, and round them to
FP8. Here caches have the model's dtype, as in transformers. Without rounding the matrix would change no product of
queries and keys, so it is left out.

Source: DeepSeek-V4 (2026), sections 2.2 and 2.3, as transformers' modeling_deepseek_v4 computes them.
"""

from typing import Any, NoReturn

import torch
from lmdeploy.pytorch.backends.attention import V4AttentionImpl
from lmdeploy.pytorch.backends.compressor import V4CompressorImpl
from lmdeploy.pytorch.backends.hc_prepost import HCPrePostImpl
from lmdeploy.pytorch.backends.indexer import V4IndexerImpl
from lmdeploy.pytorch.consts import (
    V4_COMPRESSED_KV_R4_CACHE_NAME,
    V4_COMPRESSED_KV_R128_CACHE_NAME,
    V4_INDEX_KV_R4_CACHE_NAME,
)
from lmdeploy.pytorch.engine.cache_engine.schema import BlockCacheGeometry, BlockCacheRequest
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device import activation, cache_blocks
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.attention import StepMetadata
from dlinfer.framework.lmdeploy_ext.layers.from_spec import FromSpec

_CACHES = {4: V4_COMPRESSED_KV_R4_CACHE_NAME, 128: V4_COMPRESSED_KV_R128_CACHE_NAME}
"""Tokens of an entry -> the name of LMDeploy's cache of entries."""


class CompressedAttention(FromSpec, V4AttentionImpl):
    """Attention to a window of tokens and, if the layer has a compressor, to compressed entries."""

    def forward(
        self,
        query: Tensor,
        kv: Tensor,
        attn_sink: Tensor,
        attn_metadata: Any,
        caches: Any,
        slot: Tensor,
        index_out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [N, heads, size] of query [N, heads, size] to kv [N, size] and to the caches.

        attn_metadata: the step's StepMetadata. caches: the windows [slots, window, size], which kv is written into, and
        the cache of entries or None. slot: [sequences], the slot of each sequence's window. index_out: the entries that
        an indexer chose, int32 [N, 1, count], or None for all.
        """
        windows, entries = caches
        sequences = (slot, attn_metadata.cu_seqlens_q_cpu[1:], attn_metadata.kv_seqlens_cpu)
        cached = (entries, attn_metadata.block_offsets, index_out, max(self.spec.compress_ratio, 1))
        return ops.compressed_attention(query, kv, attn_sink, windows, *sequences, *cached, self.spec.scale)


class EntryIndexer(FromSpec, V4IndexerImpl):
    """For each new token, scores all entries of the same sequence and chooses the best."""

    def forward(self, query: Tensor, weights: Tensor, block_caches: Any, meta: Any) -> Any:
        """Return for each new token the entries to attend to: int32 [N, 1, index_top_k], padded with -1.

        query: [N, heads, size], rotated. weights: [N, heads]. block_caches: the indexer's cache of entries. meta: the
        step's StepMetadata.
        """
        sequences = (meta.cu_seqlens_q_cpu[1:], meta.kv_seqlens_cpu, meta.block_offsets)
        choice = (self.spec.compress_ratio, self.spec.index_top_k)
        return ops.compressed_indexer(query, block_caches, weights.to(query.dtype), *sequences, *choice)


class WindowCompressor(FromSpec, V4CompressorImpl):
    """Compresses each window of tokens to one entry, and writes it into a cache of entries.

    dtype: the model's. The build spec lacks it, so the model's patch sets it.
    """

    dtype: torch.dtype | None = None

    def get_block_cache_requests(self, geometry: BlockCacheGeometry) -> tuple[BlockCacheRequest, ...]:
        """Request one cache of entries in the model's dtype and the vendor's layout."""
        assert self.dtype is not None, "the model's patch sets it"
        name = V4_INDEX_KV_R4_CACHE_NAME if self.spec.is_indexer else _CACHES[self.spec.compress_ratio]
        layout = cache_blocks.layout(activation.torch_device())
        entries = geometry.kernel_block_size // self.spec.compress_ratio
        shape = layout.shape(1, entries, 1, self.spec.head_dim)[1:]
        return (BlockCacheRequest(name=name, shape=shape, dtype=self.dtype, per_row_contiguous=True),)

    def compress(
        self,
        kv: Tensor,
        score: Tensor,
        ape: Tensor,
        state: Tensor,
        slot: Tensor,
        meta: StepMetadata,
    ) -> Tensor:
        """Return [N, head_dim]: at the last token of each window the window's entry, neither normed nor rotated.

        kv, score: [N, width], the projections of the new tokens. ape: [window, width]. state: [slots, 2, rows, width];
        the new tokens are written into it. slot: [sequences].
        """
        assert meta.cu_seqlens_q_cpu is not None and meta.past_lengths is not None
        sequences = (slot, meta.cu_seqlens_q_cpu[1:], meta.past_lengths)
        return ops.compress_windows(kv, score, ape, state, *sequences, self.spec.head_dim)

    def write(self, entries: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Write the entries [N, head_dim] into their slots of the cache. slots: int64 [N]; -1 for tokens without."""
        keys = entries[:, None]
        ops.fill_kv_cache(keys, keys[..., :0], cache, cache[..., :0], slots)

    def score_and_fill_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise UnsupportedFeatureError."""
        _refuse_part("score_and_fill_state")

    def write_compressed_kv(self, *args: Any, **kwargs: Any) -> None:
        """Raise UnsupportedFeatureError."""
        _refuse_part("write_compressed_kv")

    def rotate_activation(self, x: Tensor) -> Tensor:
        """Return x: without rounding the rotation changes no product of queries and keys."""
        return x


def _refuse_part(name: str) -> NoReturn:
    """Raise UnsupportedFeatureError from a method that LMDeploy's base class demands, but that nothing calls here."""
    raise refuse(f"a separate call of {name}", "use LMDeploy's model class")


class HyperConnections(FromSpec, HCPrePostImpl):
    """Mixes the streams of hidden states before and after a layer. Computed in float32 and rounded once."""

    def pre(
        self, x: Tensor, mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the layer's input [..., dim] of out_dtype, and the weights of ``post_expand``.

        x: float32 [..., streams, dim]. mixes: float32 [..., (2 + streams) * streams], the projection of x.
        """
        count = self.spec.hc_mult
        pre, post, comb = mixes.split((count, count, count * count), dim=-1)
        base_pre, base_post, base_comb = hc_base.split((count, count, count * count))
        pre = (pre * hc_scale[0] + base_pre).sigmoid() + self.spec.eps
        post = 2 * (post * hc_scale[1] + base_post).sigmoid()
        scores = (comb * hc_scale[2] + base_comb).unflatten(-1, (count, count))
        mixing = ops.sinkhorn(scores, self.spec.sinkhorn_iters, self.spec.eps)
        return self.pre_reduce(x, pre, out_dtype), post, mixing

    def pre_reduce(self, x: Tensor, pre: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Return the sum of the streams x [..., streams, dim], each times its weight in pre [..., streams]."""
        return (pre[..., None] * x).sum(-2).to(out_dtype)

    def post_expand(self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Return the streams after a layer, [..., streams, dim] of x's dtype.

        x: [..., dim], the layer's result. residual: [..., streams, dim], the streams before it. Stream k is post[k] * x
        plus the sum over j of comb[j, k] * residual[j].
        """
        mixed = comb.transpose(-1, -2) @ residual.float()
        return (post[..., None] * x[..., None, :].float() + mixed).to(x.dtype)


def partial_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [N, heads, size] with the last 2R numbers of each head rotated, in pairs of neighbours.

    cos, sin: [N, R]. Computed in float32 and rounded once. Source: RoFormer (Su et al., 2021, arXiv:2104.09864).
    """
    kept, pairs = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    angles = cos[:, None].float(), sin[:, None].float()
    rotated = ops.apply_rotary_pos_emb_interleaved(pairs.float(), *angles, False)
    return torch.cat((kept, rotated.to(x.dtype)), dim=-1)


def unweighted_norm(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean of x's squares + eps), over the last dimension. Computed in float32 and rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
