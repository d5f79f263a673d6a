"""Attention of one new token a sequence over a quantised paged cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.attention.quantised_prefill import (
    check_quantised_pages,
    quantised_paged_prefill_attention,
)
from dlinfer.ops.attention.quantised_samples import cases_of_formats, quantised_pages
from dlinfer.ops.attention.samples import DECODE, lengths, per_head, queries
from dlinfer.ops.attention.semantics import TOLERANCES, check_extras, check_queries, check_tables
from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op


@fused_op(mutates=("attn_output",), tolerances=TOLERANCES)
def quantised_paged_decode_attention(
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
    k_scales_zeros: Tensor,
    v_scales_zeros: Tensor,
    quant_bits: int,
) -> None:
    """What ``dlinfer.ops.paged_decode_attention`` calls for quantised caches, see ``kv_quantisation``.

    Keys and values are read in q's dtype.

    q: [sequences, q_heads, head_size], any strides.
    k_cache, v_cache: [blocks, block_size, kv_heads, stored size], in the vendor's layout and the format's dtype.
    block_offsets: [sequences, max_blocks], int32 or int64. block_size: slots in a block, as in the caches.
    kv_seqlens: [sequences], on any device: keys of each sequence, the new tokens included.
    max_kv_seq_len: an upper bound.
    num_q_heads, num_kv_heads: heads of q and of the caches; the first is a multiple of the second.
    attn_output: [sequences, q_heads, head_size_v], mutated; row i may share memory with row i of q.
    softmax_scale, window_left, logit_softcapping, alibi_slopes, sinks: see
        ``paged_decode_attention``; -1 is no bound.
    k_scales_zeros, v_scales_zeros: [blocks, block_size, kv_heads, 2] for int8 and int4, float32 of one element each for
        fp8. quant_bits: 8, 4, 16 or 17.

    Returns nothing. Raises OpArgumentError.
    """
    quantised_paged_prefill_attention.reference(
        q,
        k_cache,
        v_cache,
        block_offsets,
        block_size,
        torch.arange(1, q.shape[0] + 1),
        kv_seqlens,
        1,
        max_kv_seq_len,
        num_q_heads,
        num_kv_heads,
        attn_output,
        softmax_scale,
        True,
        window_left,
        -1,
        logit_softcapping,
        alibi_slopes,
        sinks,
        k_scales_zeros,
        v_scales_zeros,
        quant_bits,
    )


@quantised_paged_decode_attention.check
def _check_quantised_paged_decode_attention(
    rules: Rules,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    kv_seqlens: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scales_zeros: Tensor,
    v_scales_zeros: Tensor,
    quant_bits: int,
) -> None:
    check_queries(rules, q, attn_output, num_q_heads, num_kv_heads)
    check_quantised_pages(
        rules,
        q,
        (k_cache, v_cache),
        (k_scales_zeros, v_scales_zeros),
        quant_bits,
        block_size,
        num_kv_heads,
        attn_output,
    )
    check_tables(rules, q, block_offsets, kv_seqlens)
    rules.size("block_offsets", block_offsets, 0, q.shape[0], "one sequence for each token of q")
    check_extras(rules, q, alibi_slopes, sinks)


@quantised_paged_decode_attention.samples
def _quantised_paged_decode_attention_samples(make: SampleMaker) -> Iterator[Sample]:
    for name, case, quant_bits in cases_of_formats(DECODE):
        q, attn_output = queries(make, case)
        _, kv_seqlens = lengths(case)
        caches, scales, table = quantised_pages(make, case, quant_bits)
        args = (
            q,
            *caches,
            table,
            case.block_size,
            kv_seqlens,
            max(case.keys),
            *case.heads,
            attn_output,
            case.softmax_scale,
            case.window[0],
            case.softcap,
            *per_head(make, case),
            *scales,
            quant_bits,
        )
        yield Sample(name, args, aliased=case.aliased)
