"""Attention of several new tokens per sequence over keys and values in the paged cache."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from dlinfer.ops.attention.kv_cache import canonical, guard_layout, packed
from dlinfer.ops.attention.kv_quantisation import read_size, scales_of
from dlinfer.ops.attention.quantised_prefill import quantised_paged_prefill_attention
from dlinfer.ops.attention.samples import PAGED_PREFILL, paged_prefill_arguments
from dlinfer.ops.attention.semantics import (
    TOLERANCES,
    Scoring,
    attend_all,
    check_pages,
    refuse_mask,
    scale_of,
    window,
)
from dlinfer.ops.core.checks import ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op


@fused_op(mutates=("attn_output",), tolerances=TOLERANCES)
def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    max_q_seq_len: int,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """The torch op behind ``dlinfer.ops.paged_prefill_attention``, which documents the arguments.

    q_ends: [sequences], the index after each sequence's last query (``actual_q_seqlens``).
    attn_output: mutated, except rows after the last query; row i may share memory with row i of q.
    window_left, window_right: -1 for no bound.

    Returns nothing.
    """
    scoring = Scoring(
        softmax_scale, causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks
    )
    sequences = cached_sequences(k_cache, v_cache, block_offsets, kv_seqlens)
    attend_all(q, q_ends, sequences, attn_output, scoring)


def cached_sequences(
    k_cache: Tensor, v_cache: Tensor, block_offsets: Tensor, kv_seqlens: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the (keys, values) of each sequence, copied from the cache. Both are [kv_len, kv_heads, size]."""
    keys, values = canonical(k_cache), canonical(v_cache)
    for blocks, kv_len in zip(block_offsets, ints(kv_seqlens), strict=True):
        chosen = blocks[: -(-kv_len // keys.shape[1])].long()
        yield keys[chosen].flatten(0, 1)[:kv_len], values[chosen].flatten(0, 1)[:kv_len]


@paged_prefill_attention.python_call
def _call_paged_prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    actual_q_seqlens: Tensor,
    kv_seqlens: Tensor,
    max_q_seq_len: int,
    max_kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_mask: Sequence[Tensor | None] = (),
    *,
    head_size_v: int | None = None,
    softmax_scale: float | None = None,
    attn_output: Tensor | None = None,
    kv_scales: Tensor | None = None,
    kv_zeros: Tensor | None = None,
    quant_bits: int | None = 0,
    causal: bool = True,
    sliding_window: int | Sequence[int] | None = None,
    logit_softcapping: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scales_zeros: Tensor | None = None,
    v_scales_zeros: Tensor | None = None,
) -> Tensor:
    """Compute the attention of packed sequences over the paged cache.

    ``dlinfer.ops.attention.semantics`` has the formula. q, k, v and attn_output may have a leading dimension of 1.

    q: [tokens, q_heads, head_size], any strides.
    k, v: keys and values of q's tokens; not read, because the cache already has them.
    k_cache: [blocks, block_size, kv_heads, head_size], in the vendor's layout and q's dtype.
    v_cache: [blocks, block_size, kv_heads, head_size_v], likewise.
    block_offsets: [sequences, max_blocks], int32 or int64, the blocks of each sequence in order. Entries after a
        sequence's last block are not read.
    block_size: slots in a block, as in the caches.
    actual_q_seqlens: [sequences], int32 or int64, on any device: the index after each sequence's last query in q.
    kv_seqlens: [sequences], likewise: the number of keys of each sequence, the new tokens included.
    max_q_seq_len, max_kv_seq_len: upper bounds of the numbers of queries and keys of a sequence.
    num_q_heads, num_kv_heads: heads of q and of the cache; the first is a multiple of the second.
    attn_mask: empty, or the causal mask of 2048 x 2048 that LMDeploy's backend for Ascend passes.
    head_size_v: the last size of a new attn_output; None takes v_cache's.
    softmax_scale: None is 1 / sqrt(head_size).
    attn_output: [tokens, q_heads, head_size_v], mutated; may be q itself or ``q[..., :head_size_v]``.
    kv_scales, kv_zeros: must be None; static scales of quantised caches are not served.
    causal: a query sees no later key.
    sliding_window: see ``dlinfer.ops.attention.semantics.window``.
    logit_softcapping: 0 or None for no cap.
    alibi_slopes, sinks: [q_heads] or None.
    quant_bits, k_scales_zeros, v_scales_zeros: describe quantised caches, see ``fill_kv_cache``.

    Returns attn_output, or a new tensor if attn_output is None. Raises OpArgumentError. Raises UnsupportedFeatureError
    for another mask, and for a cache in another quantised format.
    """
    refuse_mask("paged_prefill_attention", attn_mask, causal)
    guard_layout(k_cache)
    scales = scales_of(
        "paged_prefill_attention", quant_bits, k_scales_zeros, v_scales_zeros, kv_scales, kv_zeros
    )
    left, right = window(sliding_window)
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
        actual_q_seqlens,
        kv_seqlens,
        max_q_seq_len,
        max_kv_seq_len,
        num_q_heads,
        num_kv_heads,
        packed(attn_output),
        scale_of(q, softmax_scale),
        causal,
        left,
        right,
        logit_softcapping or 0.0,
        alibi_slopes,
        sinks,
    )
    if scales is None:
        paged_prefill_attention.overload(*call)
    else:
        quantised_paged_prefill_attention.overload(*call, *scales, int(quant_bits or 0))
    return attn_output


paged_prefill_attention.takes(
    q="float [tokens, num_q_heads, head_size]",
    k_cache="cache like q [blocks, block_size, num_kv_heads, head_size]",
    v_cache="cache like q [v_blocks, block_size, num_kv_heads, head_size_v]",
    block_offsets="int on q [sequences, columns]",
    q_ends="int [sequences]",
    kv_seqlens="int [sequences]",
    attn_output="like q [tokens, num_q_heads, head_size_v]",
    alibi_slopes="float on q [num_q_heads]",
    sinks="float on q [num_q_heads]",
)


paged_prefill_attention.check(check_pages)


@paged_prefill_attention.samples
def _paged_prefill_attention_samples(make: SampleMaker) -> Iterator[Sample]:
    for case in PAGED_PREFILL:
        yield Sample(case.name, paged_prefill_arguments(make, case), aliased=case.aliased)
