"""Attention layers for LMDeploy that pass all their build options to the ops.

LMDeploy's own dlinfer layers take sliding_window, logit_softcapping, alibi and learnable_sink, but pass none of them to
the op. LMDeploy's layer for packed sequences also drops causal.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.messages import QuantPolicy
from lmdeploy.pytorch.backends.attention import AttentionImpl
from lmdeploy.pytorch.backends.dlinfer.attention import DlinferAttentionMetadata
from lmdeploy.pytorch.backends.flash_attention import FlashAttentionImpl
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.from_spec import FromSpec
from dlinfer.framework.lmdeploy_ext.layers.positions import windows


@dataclass
class StepMetadata(DlinferAttentionMetadata):
    """LMDeploy's attention metadata of a step of B sequences and N new tokens, with more fields.

    LMDeploy passes this object to all kinds of layers.
    cu_seqlens_q_cpu, kv_seqlens_cpu: [B + 1] and [B], copies of cu_seqlens_q and kv_seqlens in host memory.
    adapter_ids: int64 [N], the LoRA adapter of each token, 0 for no adapter; None if the engine has no adapters.
    fresh: bool [B], whether each sequence begins in this step. past_lengths: [B], how many tokens each sequence has
        before this step. Both are read by layers that keep a state for each sequence.
    kept_rows: int64 [K], indices of the hidden states that a compiled forward returns; None if it returns all N.
    image_rows: int64 [R], indices of the image tokens, which also see the later tokens of their image; None if no token
        sees later ones. image_ends, image_lengths: int64 [images], in host memory: for each image the index after its
        last token in image_rows, and in its sequence. image_blocks: [images, blocks], block_offsets of its sequence.
    chunk_ends, chunk_lengths, chunk_blocks: for layers whose attention is within chunks of a text, or up to the end of
        a diffusion block; else None. Each chunk or block counts as a sequence of its own. They are
        cu_seqlens_q without its 0, kv_seqlens (both in host memory) and block_offsets.
    """

    max_q_seqlen: int = 1
    kv_flatten_size: int = 1
    cu_seqlens_q_cpu: Tensor | None = None
    kv_seqlens_cpu: Tensor | None = None
    adapter_ids: Tensor | None = None
    fresh: Tensor | None = None
    past_lengths: Tensor | None = None
    kept_rows: Tensor | None = None
    image_rows: Tensor | None = None
    image_ends: Tensor | None = None
    image_lengths: Tensor | None = None
    image_blocks: Tensor | None = None
    chunk_ends: Tensor | None = None
    chunk_lengths: Tensor | None = None
    chunk_blocks: Tensor | None = None


def step_metadata(context: Any) -> StepMetadata:
    """Return the attention metadata of a step, from LMDeploy's StepContext of B sequences and N new tokens."""
    # Speculative decoding verifies several tokens of a sequence at once: a short prefill behind a cached beginning.
    is_decoding = context.is_decoding and context.max_q_seqlen == 1
    q_seqlens, kv_seqlens = context.q_seqlens, context.kv_seqlens
    block_size = context.cache_config.kernel_block_size
    past_lengths = kv_seqlens - q_seqlens
    tokens = context.input_ids.numel()
    if is_decoding:
        cu_seqlens = torch.arange(tokens + 1, dtype=torch.int32, device=q_seqlens.device)
        slots = last_slots(kv_seqlens, context.block_offsets, block_size)
    else:
        cu_seqlens = torch.nn.functional.pad(q_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        slots = cache_slots(q_seqlens, kv_seqlens, cu_seqlens, context.block_offsets, block_size, tokens)
    adapter_ids = context.local_adapter_ids
    if adapter_ids is not None:
        adapter_ids = torch.repeat_interleave(adapter_ids.long(), q_seqlens.long(), output_size=tokens)
    return StepMetadata(
        is_decoding=is_decoding,
        block_offsets=context.block_offsets,
        q_start_loc=cu_seqlens[:-1],
        q_seqlens=q_seqlens,
        kv_seqlens=kv_seqlens,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_q_cpu=cu_seqlens.cpu(),
        kv_seqlens_cpu=kv_seqlens.cpu(),
        kv_start_indices=slots,
        block_size=block_size,
        is_prefill_no_cache=not context.is_decoding and torch.equal(q_seqlens, kv_seqlens),
        max_q_seqlen=context.max_q_seqlen,
        max_kv_seq_len=context.max_kv_seqlen,
        kv_flatten_size=context.sum_kv_seqlen,
        quant_policy=QuantPolicy(
            context.kv_quant_policy
        ),  # `lmdeploy chat` sets an int, which graphs cannot fix
        adapter_ids=adapter_ids,
        fresh=past_lengths == 0,
        past_lengths=past_lengths,
    )


def cache_slots(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    cu_seqlens: Tensor,
    block_offsets: Tensor,
    block_size: int,
    tokens: int,
) -> Tensor:
    """Return the slot of each new token in the paged cache, block * block_size + offset: int64 [tokens].

    q_seqlens: [B], each sequence's number of new tokens. kv_seqlens: [B], each sequence's length, new tokens included.
    cu_seqlens: [B + 1], cumulative q_seqlens from 0. block_offsets: [B, blocks], numbers of each sequence's blocks.
    """
    sequence = torch.repeat_interleave(q_seqlens.long(), output_size=tokens)
    first = (kv_seqlens - q_seqlens).long() - cu_seqlens[:-1].long()
    position = torch.arange(tokens, device=q_seqlens.device) + first[sequence]
    block = torch.div(position, block_size, rounding_mode="floor")
    return block_offsets.long()[sequence, block] * block_size + position - block * block_size


def last_slots(kv_seqlens: Tensor, block_offsets: Tensor, block_size: int) -> Tensor:
    """Return the cache slot of each sequence's one new token: int64 [B]. A faster ``cache_slots`` for decoding."""
    position = kv_seqlens.long() - 1
    block = position // block_size
    first = block_offsets.gather(1, block.unsqueeze(1)).squeeze(1).long() * block_size
    return first + position - block * block_size


class PagedAttention(AttentionImpl[DlinferAttentionMetadata]):
    """Attention over the paged KV cache: fills the cache, then calls the op for prefill or the one for decoding.

    is_chunked: whether attention is within chunks of a text (Llama 4).
    causal: False for block diffusion, where a token sees its whole block.
    """

    is_chunked = False

    @classmethod
    def from_spec(cls, spec: Any) -> "PagedAttention | SparseAttention":
        """Build the layer of a PagedAttentionBuildSpec. In a model with an indexer this is a SparseAttention.

        Raises UnsupportedFeatureError for features that no op serves.
        """
        if spec.use_flash_mla:
            raise refuse("flash MLA", "use another model")
        if not spec.causal:
            raise refuse("paged attention that is not causal", "use another model")
        sliding_window = windows.as_pair(spec.sliding_window)
        sees_block = spec.block_sparse_size != 1
        if sees_block and (sliding_window is not None or spec.alibi or spec.mla_index_topk is not None):
            feature = "block diffusion with a sliding window, ALiBi or sparse attention"
            raise refuse(feature, "use another model")
        layer = cls if spec.mla_index_topk is None else SparseAttention
        return layer(
            num_heads=spec.num_heads,
            head_size=spec.head_dim,
            scale=spec.scale,
            num_kv_heads=spec.num_kv_heads,
            v_head_size=spec.v_head_dim,
            alibi=spec.alibi,
            sliding_window=sliding_window,
            logit_softcapping=spec.logit_softcapping or 0.0,
            causal=not sees_block,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        attn_metadata: DlinferAttentionMetadata,
        k_scales_zeros: Tensor | None = None,
        v_scales_zeros: Tensor | None = None,
        learnable_sink: Tensor | None = None,
        nsa_indices: Tensor | None = None,
        inplace: bool = True,
    ) -> Tensor:
        """Return attention [N, Hq, Dv] of query [N, Hq, D] to key [N, Hkv, D], value [N, Hkv, Dv] and the caches.

        Writes key and value into the caches. With ``inplace``, the result overwrites a contiguous query. Otherwise the
        result is a new tensor. A query that is not contiguous, such as GLM-4's slice of a projection, is not
        overwritten, because a graph could not flatten the heads of the result.

        k_scales_zeros, v_scales_zeros: for quantised caches, [blocks, block_size, Hkv, 2], also written. For fp8 caches
        each is a single scale. A prompt attends to the quantised numbers in its cache, as in LMDeploy's CUDA layers.
        """
        if nsa_indices is not None:
            raise refuse("sparse attention by token indices", "use another model")
        meta: Any = attn_metadata
        quantised = _quantised(meta, k_scales_zeros, v_scales_zeros)
        ops.fill_kv_cache(key, value, k_cache, v_cache, meta.kv_start_indices, **quantised)
        size = query.shape[-1]
        is_dense = query.stride() == (query.shape[1] * size, size, 1)  # a graph's capture knows strides
        shared: dict[str, Any] = {
            "softmax_scale": self.scale,
            "attn_output": query[..., : self.v_head_size] if inplace and is_dense else None,
            "head_size_v": self.v_head_size,
            "sliding_window": self.sliding_window,
            "logit_softcapping": self.logit_softcapping,
            "alibi_slopes": self.alibi_slopes,
            "sinks": learnable_sink,
        }
        if not self.causal:
            shared["causal"] = False
        assert meta.cu_seqlens_q_cpu is not None
        q_ends = meta.cu_seqlens_q_cpu[1:]
        heads, caches = (self.num_heads, self.num_kv_heads), (k_cache, v_cache)
        paged = (*caches, meta.block_offsets, meta.block_size, q_ends, meta.kv_seqlens_cpu)
        in_chunks = self.is_chunked or not self.causal
        if in_chunks:
            paged = (*caches, meta.chunk_blocks, meta.block_size, meta.chunk_ends, meta.chunk_lengths)
        if meta.is_decoding:
            lengths = (meta.max_kv_seq_len, *heads)
            return ops.paged_decode_attention(query, *paged, *lengths, **shared, **quantised)
        lengths = (meta.max_q_seqlen, meta.max_kv_seq_len, *heads)
        rows, images = getattr(meta, "image_rows", None), None
        window: Any = self.sliding_window
        if rows is not None:  # computed first, because the result may overwrite the query
            tables = (meta.image_blocks, meta.block_size, meta.image_ends, meta.image_lengths)
            own = {**shared, **quantised, "attn_output": None, "causal": False}
            if window is not None:
                own["sliding_window"] = (window[0], -1)
            images = ops.paged_prefill_attention(query[rows], key, value, *caches, *tables, *lengths, **own)
        if meta.is_prefill_no_cache and not quantised and not in_chunks:
            lengths = (meta.q_seqlens, meta.kv_seqlens, meta.max_q_seqlen, *heads)
            shared["actual_seq_lengths_cpu"] = q_ends
            out = ops.prefill_attention(query, key, value, *caches, *lengths, **shared)
        else:
            out = ops.paged_prefill_attention(query, key, value, *paged, *lengths, **shared, **quantised)
        return out if images is None else out.index_copy_(0, rows, images)


class SparseAttention(AttentionImpl[DlinferAttentionMetadata]):
    """Latent attention to the positions that an indexer chose.

    It fills the cache, then calls one op, which serves both prefill and decoding.
    """

    def __init__(self, **fields: Any) -> None:
        """Take LMDeploy's AttentionImpl fields. Raises UnsupportedFeatureError for features that the op lacks."""
        super().__init__(**fields)
        lacking = {
            "sliding_window": self.sliding_window,
            "logit_softcapping": self.logit_softcapping,
            "alibi": self.alibi,
            "more than one head of keys": self.num_kv_heads != 1,
        }
        for feature, is_asked in lacking.items():
            if is_asked:
                raise refuse(f"sparse attention with {feature}", "use another model")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        attn_metadata: DlinferAttentionMetadata,
        k_scales_zeros: Tensor | None = None,
        v_scales_zeros: Tensor | None = None,
        learnable_sink: Tensor | None = None,
        nsa_indices: Tensor | None = None,
        inplace: bool = True,
    ) -> Tensor:
        """Return the attention, a new tensor [N, Hq, C]. query: [N, Hq, C + R]. key: [N, 1, C + R]. value: [N, 1, C].

        C: size of a latent. R: size of the rotated part.
        nsa_indices: int32 [N, count]; for each token the positions in its sequence to attend to; negative entries are
        unused.
        k_cache: in the vendor's layout, C + R numbers for each token; key is written into it.
        v_cache: a view of the first C numbers of each token in k_cache.
        """
        if learnable_sink is not None:
            raise refuse("sparse attention with sinks", "use another model")
        meta, size = attn_metadata, self.v_head_size
        assert nsa_indices is not None, "every layer of such a model has the choice of an indexer"
        assert meta.cu_seqlens_q_cpu is not None
        ops.fill_kv_cache(key, value, k_cache, v_cache, meta.kv_start_indices)
        latents = (query[..., :size], v_cache, v_cache, nsa_indices[:, None], self.scale)
        sequences = (meta.block_offsets, meta.cu_seqlens_q_cpu[1:], meta.kv_seqlens_cpu)
        return ops.sparse_flash_attention(*latents, *sequences, query[..., size:], k_cache[..., size:])


def _quantised(
    meta: DlinferAttentionMetadata, k_scales_zeros: Tensor | None, v_scales_zeros: Tensor | None
) -> dict[str, Any]:
    """Return the ops' arguments for quantised caches; an empty dict if the caches are not quantised."""
    if not meta.quant_policy:
        return {}
    bits = int(meta.quant_policy)
    if k_scales_zeros is None or v_scales_zeros is None:
        feature = (
            f"quant_policy={bits} with this model, whose class in LMDeploy passes no scales to attention,"
        )
        raise refuse(feature, "use quant_policy=0")
    return {"k_scales_zeros": k_scales_zeros, "v_scales_zeros": v_scales_zeros, "quant_bits": bits}


class VarlenAttention(FromSpec, FlashAttentionImpl):
    """Attention over packed sequences without a cache, for vision encoders."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_start_loc: Tensor,
        q_seqlens: Tensor,
        kv_start_loc: Tensor,
        kv_seqlens: Tensor,
        max_q_seqlen: int | None = None,
    ) -> Tensor:
        """Return the attention, a new tensor [N, Hq, Dv]. query: [N, Hq, D]. key: [M, Hkv, D]. value: [M, Hkv, Dv].

        N, M: the number of queries and the number of keys, in all sequences together.
        """
        spec = self.spec
        longest = (
            query.shape[0] if max_q_seqlen is None else max_q_seqlen
        )  # an upper bound that needs no read from the device
        lengths = (q_seqlens, kv_seqlens, longest, spec.num_heads, spec.num_kv_heads)
        return ops.prefill_attention(
            query,
            key,
            value,
            None,
            None,
            *lengths,
            softmax_scale=spec.scale,
            actual_seq_lengths_cpu=(q_start_loc + q_seqlens).cpu(),
            head_size_v=spec.v_head_dim,
            causal=spec.causal,
            sliding_window=spec.sliding_window,
            logit_softcapping=spec.logit_softcapping or 0.0,
        )
