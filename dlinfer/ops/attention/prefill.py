"""Attention over new tokens, packed in q, k and v, without a cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import packed
from dlinfer.ops.attention.samples import PREFILL, lengths, new_tokens, queries, scoring
from dlinfer.ops.attention.semantics import (
    TOLERANCES,
    Scoring,
    attend_all,
    check_heads,
    refuse_mask,
    scale_of,
    window,
)
from dlinfer.ops.core.checks import ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op


@fused_op(mutates=("attn_output",), tolerances=TOLERANCES)
def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    max_q_seq_len: int,
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
    """The torch op behind ``dlinfer.ops.prefill_attention``, which documents the arguments.

    q_ends: [sequences], the index after each sequence's last query (``actual_seq_lengths_cpu``).
    attn_output: mutated, except rows after the last query; row i may share memory with row i of q.
    window_left, window_right: -1 for no bound.

    Returns nothing.
    """
    scoring = Scoring(
        softmax_scale, causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks
    )
    lengths = ints(kv_seqlens)
    keys, values = (torch.split(x[: sum(lengths)], lengths) for x in (k, v))
    attend_all(q, q_ends, zip(keys, values, strict=True), attn_output, scoring)


@prefill_attention.python_call
def _call_prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    max_q_seq_len: int | None,
    num_q_heads: int,
    num_kv_heads: int,
    attn_mask: Sequence[Tensor | None] = (),
    *,
    softmax_scale: float | None = None,
    attn_output: Tensor | None = None,
    actual_seq_lengths_cpu: Tensor | None = None,
    head_size_v: int | None = None,
    causal: bool = True,
    sliding_window: int | Sequence[int] | None = None,
    logit_softcapping: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of packed sequences, each over its own new tokens.

    ``dlinfer.ops.attention.semantics`` has the formula. q, k, v and attn_output may have a leading dimension of 1.

    q: [tokens, q_heads, head_size], any strides.
    k: [kv_tokens, kv_heads, head_size], v: [kv_tokens, kv_heads, head_size_v], any strides.
    k_cache, v_cache: not read, may be None.
    q_seqlens, kv_seqlens: [sequences], int32 or int64: the numbers of queries and keys of each sequence, which differ
        only for cross attention.
    max_q_seq_len: an upper bound of q_seqlens, or None.
    num_q_heads, num_kv_heads: heads of q and of k; the first is a multiple of the second.
    attn_mask: empty, or the causal mask of 2048 x 2048 that LMDeploy's backend for Ascend passes.
    head_size_v: the last size of a new attn_output; None takes v's.
    softmax_scale: None is 1 / sqrt(head_size).
    attn_output: [tokens, q_heads, head_size_v], mutated; may be q itself or ``q[..., :head_size_v]``.
    actual_seq_lengths_cpu: [sequences], the index after each sequence's last query in q; None computes it from
        q_seqlens.
    causal: a query sees no later key.
    sliding_window: see ``dlinfer.ops.attention.semantics.window``.
    logit_softcapping: 0 or None for no cap.
    alibi_slopes, sinks: [q_heads] or None.

    Returns attn_output, or a new tensor if attn_output is None. Raises OpArgumentError. Raises UnsupportedFeatureError
    for another mask.
    """
    refuse_mask("prefill_attention", attn_mask, causal)
    left, right = window(sliding_window)
    if attn_output is None:
        attn_output = q.new_empty((*q.shape[:-1], head_size_v or v.shape[-1]))
    prefill_attention.overload(
        packed(q),
        packed(k),
        packed(v),
        q_seqlens.cumsum(0) if actual_seq_lengths_cpu is None else actual_seq_lengths_cpu,
        kv_seqlens,
        q.numel() if max_q_seq_len is None else max_q_seq_len,
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
    return attn_output


prefill_attention.takes(
    q="float [tokens, num_q_heads, head_size]",
    k="like q [kv_tokens, num_kv_heads, head_size]",
    v="like q [kv_tokens, num_kv_heads, head_size_v]",
    q_ends="int [sequences]",
    kv_seqlens="int [sequences]",
    attn_output="like q [tokens, num_q_heads, head_size_v]",
    alibi_slopes="float on q [num_q_heads]",
    sinks="float on q [num_q_heads]",
)


prefill_attention.check(check_heads)


@prefill_attention.samples
def _prefill_attention_samples(make: SampleMaker) -> Iterator[Sample]:
    for case in PREFILL:
        q, attn_output = queries(make, case)
        k, v = new_tokens(make, case)
        sizes = *lengths(case), max(case.q_lens), *case.heads
        args = (q, k, v, *sizes, attn_output, *scoring(make, case))
        yield Sample(case.name, args, aliased=case.aliased)
