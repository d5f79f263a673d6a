"""Prompts attend to their own new tokens or to pages of the KV cache: one call of flash_attention for all sequences."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import KernelDeclined
from dlinfer.vendor.camb import layouts, refusing
from dlinfer.vendor.camb.attention import fused
from dlinfer.vendor.camb.sdk import tmo


@dataclass(frozen=True)
class _Batch:
    """The sequences of a call, without those that have neither queries nor keys.

    q_lens, kv_lens: the number of queries and the number of keys of each sequence.
    kept: the rows of the sequences in the op's arguments; None if no row was left out.
    """

    q_lens: list[int]
    kv_lens: list[int]
    kept: list[int] | None

    @classmethod
    def of(cls, q_ends: Tensor, kv_seqlens: Tensor, aligned: bool) -> "_Batch":
        """Make a batch from the op's arguments.

        aligned: whether the attention is causal or has a window. If so, flash_attention needs a position for each
            query. It takes the queries as the sequence's last tokens. The documents do not say so, but every known
            caller that serves prompts after cached tokens relies on it.

        Raises KernelDeclined for a sequence with queries but no keys, or keys but no queries.
        Raises KernelDeclined, if ``aligned``, for a sequence with more queries than keys.
        The documents cover neither case.
        """
        ends = q_ends.tolist()
        lens = list(zip((b - a for a, b in pairwise([0, *ends])), kv_seqlens.tolist(), strict=True))
        kept = [row for row, (queries, keys) in enumerate(lens) if queries or keys]
        for queries, keys in (lens[row] for row in kept):
            if not queries or not keys:
                raise KernelDeclined(
                    reason=f"a sequence has {queries} queries and {keys} keys, but needs both"
                )
            if aligned and queries > keys:
                raise KernelDeclined(
                    reason=f"a sequence has {queries} queries but only {keys} keys, and some keys are hidden"
                )
        q_lens, kv_lens = ([lens[row][part] for row in kept] for part in (0, 1))
        return cls(q_lens, kv_lens, None if len(kept) == len(lens) else kept)


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: _Batch, call: Any, tables: Tensor | None) -> None:
    """Write the attention of a non-empty batch into call.attn_output.

    For a latent cache v is the whole keys, which begin with the values. So the op's result is wider than attn_output,
    and only its first elements are kept.
    """
    tokens = sum(batch.q_lens)
    q, target = q[:tokens], call.attn_output[:tokens]
    if v.shape[-1] == target.shape[-1]:
        out = fused.destination(target, q, k, v)
    else:
        out = torch.empty((*target.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    ends = [
        torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=q.device)
        for lens in (batch.q_lens, batch.kv_lens)
    ]
    tmo().flash_attention(
        layouts.heads(q),
        k,
        v,
        out,
        *ends,
        None,
        None,
        max(batch.q_lens),
        max(batch.kv_lens),
        call.softmax_scale,
        call.causal,
        call.window_left,
        -1 if call.causal else call.window_right,
        block_tables=tables,
    )
    if out is not target:
        target.copy_(out[..., : target.shape[-1]])


def _is_aligned(call: Any) -> bool:
    return call.causal or call.window_left >= 0 or call.window_right >= 0


@dataclass(frozen=True)
class _Call:
    """The arguments of flash_attention other than queries, keys, values and lengths."""

    attn_output: Tensor
    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int


@refusing.where(fused.refuses)
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
    call = _Call(attn_output, softmax_scale, causal, window_left, window_right)
    batch = _Batch.of(q_ends, kv_seqlens, _is_aligned(call))
    if batch.q_lens:
        keys = sum(batch.kv_lens)
        _attend(q, layouts.heads(k[:keys]), layouts.heads(v[:keys]), batch, call, None)


@refusing.where(lambda call: fused.refuses(call) or fused.refuses_pages(call, (layouts.BLOCK_SIZE,)))
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
    call = _Call(attn_output, softmax_scale, causal, window_left, window_right)
    batch = _Batch.of(q_ends, kv_seqlens, _is_aligned(call))
    if batch.q_lens:
        tables = layouts.index(block_offsets, q.device)
        if batch.kept is not None:
            tables = tables[torch.tensor(batch.kept, device=q.device)]
        # the op needs a contiguous values' cache; in a latent cache only values as wide as the keys are one
        values = k_cache if layouts.is_latent(k_cache, v_cache) else v_cache
        _attend(q, k_cache, values, batch, call, tables)
