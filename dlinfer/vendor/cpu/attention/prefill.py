"""Prefill attention on CPU: by a C++ kernel (csrc/attention/prefill.cpp) or by torch.

The C++ kernel reads pages in place, for the whole batch at once. The torch version computes one sequence after another,
and copies the sequence's pages. Quantised caches have only the torch version, so calls with them do not count as
fallbacks. Every other call of the torch version counts as one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.attention.semantics import Scoring
from dlinfer.vendor.cpu.attention.kv_cache import Pages
from dlinfer.vendor.cpu.attention.misfit import is_dense, misfit
from dlinfer.vendor.cpu.attention.piecewise_prefill import piecewise_paged_prefill, piecewise_prefill
from dlinfer.vendor.cpu.compiled import compiled, fall_back


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
    scoring = Scoring(
        softmax_scale, causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks
    )
    kernel = _kernel("prefill_attention", q)
    if kernel is None:
        piecewise_prefill(q, k, v, q_ends, kv_seqlens, attn_output, scoring)
        return
    k, v = (x if is_dense(x) else x.contiguous() for x in (k, v))
    _run(kernel, q, (k, v), q_ends, kv_seqlens, attn_output, scoring)


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
    scoring = Scoring(
        softmax_scale, causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks
    )
    kernel = _kernel("paged_prefill_attention", q, {"k_cache": k_cache, "v_cache": v_cache})
    if kernel is None:
        caches = (Pages(k_cache), Pages(v_cache))
        piecewise_paged_prefill(q, caches, block_offsets, q_ends, kv_seqlens, attn_output, scoring)
        return
    _run(kernel, q, (k_cache, v_cache, block_offsets), q_ends, kv_seqlens, attn_output, scoring)


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
    scoring = Scoring(
        softmax_scale, causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks
    )
    caches = (Pages(k_cache, k_scales_zeros, quant_bits), Pages(v_cache, v_scales_zeros, quant_bits))
    piecewise_paged_prefill(q, caches, block_offsets, q_ends, kv_seqlens, attn_output, scoring)


def _kernel(op: str, q: Tensor, caches: dict[str, Tensor] | None = None) -> Callable[..., Any] | None:
    """Return the op's C++ kernel; None, counted as a fallback, if torch has to compute the call."""
    reason = misfit(q, caches or {})
    if reason is not None:
        fall_back(op, reason, (q, *(caches or {}).values()))
        return None
    return compiled(op, q)


def _run(
    kernel: Callable[..., Any],
    q: Tensor,
    keys: tuple[Tensor, ...],
    q_ends: Tensor,
    kv_seqlens: Tensor,
    attn_output: Tensor,
    scoring: Scoring,
) -> None:
    out = attn_output
    if not is_dense(out):
        out = torch.empty_like(out, memory_format=torch.contiguous_format)
    end = attn_output.shape[0] if out is attn_output or not len(q_ends) else int(q_ends[-1])
    kernel(
        q if is_dense(q) else q.contiguous(),
        *keys,
        q_ends.cpu(),
        kv_seqlens.cpu(),
        out,
        *scoring[:5],
        None if scoring.alibi_slopes is None else scoring.alibi_slopes.float(),
        None if scoring.sinks is None else scoring.sinks.float(),
    )
    if out is not attn_output:
        attn_output[:end] = out[:end]
