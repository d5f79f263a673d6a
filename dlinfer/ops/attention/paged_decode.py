"""Attention of one new token per sequence over keys and values in the paged cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import canonical, guard_layout, packed
from dlinfer.ops.attention.kv_quantisation import read_size, scales_of
from dlinfer.ops.attention.paged_prefill import cached_sequences
from dlinfer.ops.attention.quantised_decode import quantised_paged_decode_attention
from dlinfer.ops.attention.samples import DECODE, decode_arguments
from dlinfer.ops.attention.semantics import (
    TOLERANCES,
    Scoring,
    attend_all,
    check_pages,
    refuse_mask,
    scale_of,
    window,
)
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op


@fused_op(mutates=("attn_output",), tolerances=TOLERANCES)
def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    kv_seqlens: Tensor,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    softmax_scale: float,
    window_left: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """The torch op behind ``dlinfer.ops.paged_decode_attention``, which documents the arguments.

    attn_output: mutated; row i may share memory with row i of q. window_left: -1 for no bound. Returns nothing.
    """
    scoring = Scoring(
        softmax_scale,
        window_left=window_left,
        logit_softcapping=logit_softcapping,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    sequences = cached_sequences(k_cache, v_cache, block_offsets, kv_seqlens)
    attend_all(q, torch.arange(1, q.shape[0] + 1), sequences, attn_output, scoring)


@paged_decode_attention.python_call
def _call_paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    actual_q_seqlens: Tensor,
    kv_seqlens: Tensor,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    *,
    head_size_v: int | None = None,
    softmax_scale: float | None = None,
    attn_output: Tensor | None = None,
    kv_scales: Tensor | None = None,
    kv_zeros: Tensor | None = None,
    quant_bits: int | None = 0,
    attn_mask: Sequence[Tensor | None] = (),
    causal: bool = True,
    sliding_window: int | Sequence[int] | None = None,
    logit_softcapping: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scales_zeros: Tensor | None = None,
    v_scales_zeros: Tensor | None = None,
) -> Tensor:
    """Compute the attention of one new token of each sequence over the paged cache.

    ``dlinfer.ops.attention.semantics`` has the formula. q and attn_output may have a leading dimension of 1.

    q: [sequences, q_heads, head_size], any strides. The keys and values of the new tokens are already in the cache.
    k_cache: [blocks, block_size, kv_heads, head_size], in the vendor's layout and q's dtype.
    v_cache: [blocks, block_size, kv_heads, head_size_v], likewise.
    block_offsets: [sequences, max_blocks], int32 or int64, the blocks of each sequence in order. Entries after a
        sequence's last block are not read.
    block_size: slots in a block, as in the caches.
    actual_q_seqlens: not read, because each sequence has one query.
    kv_seqlens: [sequences], int32 or int64, on any device: the number of keys of each sequence, the new token included.
        0 marks a padding row, whose result is zeros.
    max_kv_seq_len: an upper bound of kv_seqlens.
    num_q_heads, num_kv_heads: heads of q and of the cache; the first is a multiple of the second.
    head_size_v: the last size of a new attn_output; None takes v_cache's.
    softmax_scale: None is 1 / sqrt(head_size).
    attn_output: [sequences, q_heads, head_size_v], mutated; may be q itself or ``q[..., :head_size_v]``.
    kv_scales, kv_zeros: must be None; static scales of quantised caches are not served.
    attn_mask: must be empty.
    causal: ignored, because no key comes after the query.
    sliding_window: see ``dlinfer.ops.attention.semantics.window``.
    logit_softcapping: 0 or None for no cap.
    alibi_slopes, sinks: [q_heads] or None.
    quant_bits, k_scales_zeros, v_scales_zeros: describe quantised caches, see ``fill_kv_cache``.

    Returns attn_output, or a new tensor if attn_output is None. Raises OpArgumentError. Raises UnsupportedFeatureError
    for a mask, and for a cache in another quantised format.
    """
    refuse_mask("paged_decode_attention", attn_mask)
    guard_layout(k_cache)
    scales = scales_of(
        "paged_decode_attention", quant_bits, k_scales_zeros, v_scales_zeros, kv_scales, kv_zeros
    )
    if attn_output is None:
        attn_output = q.new_empty(
            (*q.shape[:-1], head_size_v or read_size(canonical(v_cache), quant_bits or 0))
        )
    call = (
        packed(q),
        k_cache,
        v_cache,
        block_offsets,
        block_size,
        kv_seqlens,
        max_kv_seq_len,
        num_q_heads,
        num_kv_heads,
        packed(attn_output),
        scale_of(q, softmax_scale),
        window(sliding_window)[0],
        logit_softcapping or 0.0,
        alibi_slopes,
        sinks,
    )
    if scales is None:
        paged_decode_attention.overload(*call)
    else:
        quantised_paged_decode_attention.overload(*call, *scales, int(quant_bits or 0))
    return attn_output


paged_decode_attention.takes(
    q="float [tokens, num_q_heads, head_size]",
    k_cache="cache like q [blocks, block_size, num_kv_heads, head_size]",
    v_cache="cache like q [v_blocks, block_size, num_kv_heads, head_size_v]",
    block_offsets="int on q [tokens, columns]",
    kv_seqlens="int [tokens]",
    attn_output="like q [tokens, num_q_heads, head_size_v]",
    alibi_slopes="float on q [num_q_heads]",
    sinks="float on q [num_q_heads]",
)


paged_decode_attention.check(check_pages)


@paged_decode_attention.samples
def _paged_decode_attention_samples(make: SampleMaker) -> Iterator[Sample]:
    for case in DECODE:
        yield Sample(case.name, decode_arguments(make, case), aliased=case.aliased)
