"""Attention of several new tokens per sequence over a quantised paged cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.attention.kv_quantisation import (
    check_format,
    check_quantised_cache,
    dequantise,
    is_scaled_by_token,
)
from dlinfer.ops.attention.quantised_samples import quantised_attention_samples
from dlinfer.ops.attention.samples import PAGED_PREFILL, paged_prefill_arguments
from dlinfer.ops.attention.semantics import TOLERANCES, Scoring, attend_all, check_pages
from dlinfer.ops.core.checks import Rules, ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op


@fused_op(mutates=("attn_output",), tolerances=TOLERANCES)
def quantised_paged_prefill_attention(
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
    k_scales_zeros: Tensor,
    v_scales_zeros: Tensor,
    quant_bits: int,
) -> None:
    """The torch op that ``dlinfer.ops.paged_prefill_attention`` calls for quantised caches (``kv_quantisation``).

    It dequantises all keys and values to q's dtype. Those of the new tokens are read from the cache too, as in LMDeploy
    on CUDA.

    q, block_offsets, block_size, q_ends, kv_seqlens, max_q_seq_len, max_kv_seq_len, num_q_heads, num_kv_heads: as in
        the torch op ``paged_prefill_attention``.
    softmax_scale, causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks: as in the same op.
    k_cache, v_cache: [blocks, block_size, kv_heads, stored size], in the vendor's layout and the format's dtype.
    attn_output: mutated.
    k_scales_zeros, v_scales_zeros: [blocks, block_size, kv_heads, 2] for int8 and int4; for fp8 one scale each, float32
        of one element.
    quant_bits: 8, 4, 16 or 17.

    Returns nothing. Raises OpArgumentError.
    """
    scoring = Scoring(
        softmax_scale, causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks
    )
    caches = ((k_cache, k_scales_zeros), (v_cache, v_scales_zeros))
    sequences = quantised_sequences(caches, quant_bits, block_offsets, kv_seqlens, q.dtype)
    attend_all(q, q_ends, sequences, attn_output, scoring)


def quantised_sequences(
    caches: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    quant_bits: int,
    block_offsets: Tensor,
    kv_seqlens: Tensor,
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the (keys, values) of each sequence, dequantised to ``dtype``. Both are [kv_len, kv_heads, size].

    caches: a pair (cache, scales and zeros) for the keys, and one for the values.
    """
    for blocks, kv_len in zip(block_offsets, ints(kv_seqlens), strict=True):
        keys, values = (_read(*cache, quant_bits, blocks, kv_len, dtype) for cache in caches)
        yield keys, values


def _read(
    cache: Tensor, scales_zeros: Tensor, quant_bits: int, blocks: Tensor, kv_len: int, dtype: torch.dtype
) -> Tensor:
    slots = canonical(cache)
    chosen = blocks[: -(-kv_len // slots.shape[1])].long()
    scales = canonical(scales_zeros)[chosen] if is_scaled_by_token(quant_bits) else scales_zeros
    return dequantise(slots[chosen], quant_bits, scales, dtype).flatten(0, 1)[:kv_len]


quantised_paged_prefill_attention.takes(
    q="float [tokens, num_q_heads, head_size]",
    block_offsets="int on q [sequences, columns]",
    q_ends="int [sequences]",
    kv_seqlens="int [sequences]",
    attn_output="like q [tokens, num_q_heads, head_size_v]",
    alibi_slopes="float on q [num_q_heads]",
    sinks="float on q [num_q_heads]",
)


@quantised_paged_prefill_attention.check
def check_quantised_pages(
    rules: Rules,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    attn_output: Tensor,
    k_scales_zeros: Tensor,
    v_scales_zeros: Tensor,
    quant_bits: int,
) -> None:
    """Raise OpArgumentError unless quantised paged caches, and their scales and zeros, suit the call."""
    check_format(rules, quant_bits)
    check_quantised_cache(rules, "k", k_cache, k_scales_zeros, quant_bits, "q", q)
    check_quantised_cache(rules, "v", v_cache, v_scales_zeros, quant_bits, "attn_output", attn_output)
    check_pages(rules, k_cache, v_cache, block_size, num_q_heads, num_kv_heads)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        rules.size(name, canonical(cache), 2, num_kv_heads, "num_kv_heads")


@quantised_paged_prefill_attention.samples
def _quantised_paged_prefill_attention_samples(make: SampleMaker) -> Iterator[Sample]:
    return quantised_attention_samples(make, PAGED_PREFILL, paged_prefill_arguments)
