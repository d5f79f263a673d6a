"""Attention of one new token per sequence over a quantised paged cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.attention.quantised_prefill import check_quantised_pages, quantised_sequences
from dlinfer.ops.attention.quantised_samples import quantised_attention_samples
from dlinfer.ops.attention.samples import DECODE, decode_arguments
from dlinfer.ops.attention.semantics import TOLERANCES, Scoring, attend_all
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
    """The torch op that ``dlinfer.ops.paged_decode_attention`` calls for quantised caches (``kv_quantisation``).

    It dequantises keys and values to q's dtype.

    q, block_offsets, block_size, kv_seqlens, max_kv_seq_len, num_q_heads, num_kv_heads, softmax_scale, window_left,
        logit_softcapping, alibi_slopes, sinks: as in the torch op ``paged_decode_attention``.
    k_cache, v_cache: [blocks, block_size, kv_heads, stored size], in the vendor's layout and the format's dtype.
    attn_output: mutated.
    k_scales_zeros, v_scales_zeros: [blocks, block_size, kv_heads, 2] for int8 and int4; for fp8 one scale each, float32
        of one element.
    quant_bits: 8, 4, 16 or 17.

    Returns nothing. Raises OpArgumentError.
    """
    scoring = Scoring(
        softmax_scale,
        window_left=window_left,
        logit_softcapping=logit_softcapping,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    caches = ((k_cache, k_scales_zeros), (v_cache, v_scales_zeros))
    sequences = quantised_sequences(caches, quant_bits, block_offsets, kv_seqlens, q.dtype)
    attend_all(q, torch.arange(1, q.shape[0] + 1), sequences, attn_output, scoring)


quantised_paged_decode_attention.takes(
    q="float [tokens, num_q_heads, head_size]",
    block_offsets="int on q [tokens, columns]",
    kv_seqlens="int [tokens]",
    attn_output="like q [tokens, num_q_heads, head_size_v]",
    alibi_slopes="float on q [num_q_heads]",
    sinks="float on q [num_q_heads]",
)


quantised_paged_decode_attention.check(check_quantised_pages)


@quantised_paged_decode_attention.samples
def _quantised_paged_decode_attention_samples(make: SampleMaker) -> Iterator[Sample]:
    return quantised_attention_samples(make, DECODE, decode_arguments)
