"""Decode attention over pages: one call for all sequences, with one new token each."""

from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.ascend import captured, chips, refusing
from dlinfer.vendor.ascend.attention import fused, latent

_PAGE, _LARGEST_PAGE = 16, 1 << 16


def _is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether the caches are a latent cache: one head, whose values are the first part of the keys' memory."""
    if (
        not latent.fits(k_cache.shape[2], k_cache.shape[3], v_cache.shape[3])
        or k_cache.stride() != v_cache.stride()
    ):
        return False
    return k_cache.untyped_storage()._cdata == v_cache.untyped_storage()._cdata


def _refuses(call: Any) -> str | None:
    if not _is_latent(call.k_cache, call.v_cache):
        return fused.refuses(call, call.q.shape[-1]) or fused.refuses_pages(call, _PAGE, _LARGEST_PAGE)
    if call.window_left >= 0 or call.logit_softcapping > 0 or (call.alibi_slopes, call.sinks) != (None, None):
        return "_npu_paged_attention_mla does not support a window, logit_softcapping, alibi_slopes or sinks"
    return refusing.first(
        (
            refusing.lacking(chips.current().fused_attention, "_npu_paged_attention_mla"),
            refusing.floating(call.q, refusing.HALVES),
        )
    )


@refusing.where(_refuses)
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
    tasks = captured.current()
    if tasks is not None:
        out = _captured(
            tasks,
            q,
            k_cache,
            v_cache,
            block_offsets,
            block_size,
            kv_seqlens,
            num_kv_heads,
            softmax_scale,
            window_left,
        )
        attn_output.copy_(out.masked_fill(tasks.padding(kv_seqlens).view(-1, 1, 1), 0))
        return
    lengths = kv_seqlens.tolist()
    kept = [row for row, length in enumerate(lengths) if length]
    if len(kept) < len(lengths):  # padding rows have no key, and none of their blocks may be read
        attn_output.zero_()
        if not kept:
            return
        rows = torch.tensor(kept, device=q.device)
        q, block_offsets = q[rows], block_offsets[rows.to(block_offsets.device)]
        lengths = [lengths[row] for row in kept]
    if not lengths:
        return
    tables = fused.table(block_offsets)
    if _is_latent(k_cache, v_cache):
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        torch.ops.atb._npu_paged_attention_mla(
            q.contiguous(),
            k_cache,
            num_kv_heads,
            num_q_heads,
            softmax_scale,
            tables,
            torch.tensor(lengths, dtype=torch.int32, device="cpu"),
            latent.SIZE,
            out,
        )
    else:
        seen: dict[str, Any] = {"sparse_mode": 0}
        if 0 <= window_left < max(lengths) - 1:
            known, slots = torch.tensor(lengths, device=q.device), tables.shape[1] * block_size
            seen["atten_mask"] = fused.outside(known, window_left, slots)
        out = fused.attend(
            q.contiguous().unsqueeze(1),
            fused.pages(k_cache),
            fused.pages(v_cache),
            num_kv_heads,
            softmax_scale,
            block_table=tables,
            block_size=block_size,
            actual_seq_lengths_kv=lengths,
            **seen,
        ).squeeze(1)
    if len(kept) == attn_output.shape[0]:
        attn_output.copy_(out)
    else:
        attn_output[torch.tensor(kept, device=q.device)] = out


def _captured(
    tasks: captured.CapturedLengths,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    kv_seqlens: Tensor,
    num_kv_heads: int,
    softmax_scale: float,
    window_left: int,
) -> Tensor:
    """Compute the attention as a task of the captured graph. kv_seqlens: int32 [rows] on the device, 0 for padding."""
    tables = fused.table(block_offsets)
    if _is_latent(k_cache, v_cache):
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        tasks.run(
            torch.ops.atb._npu_paged_attention_mla,
            lambda lengths: {"context_lens": torch.tensor(lengths, dtype=torch.int32, device="cpu")},
            query=q.contiguous(),
            key_cache=k_cache,
            num_kv_heads=num_kv_heads,
            num_heads=q.shape[1],
            scale_value=softmax_scale,
            block_table=tables,
            mla_vheadsize=latent.SIZE,
            out=out,
        )
        return out
    seen: dict[str, Any] = {"sparse_mode": 0}
    numbers = fused.told
    if window_left >= 0:  # each replay has other lengths to compare the window with
        tables, seen["atten_mask"] = _windowed(tasks, tables, block_size, kv_seqlens, window_left)

        def numbers(lengths: list[int]) -> dict[str, Any]:
            blocks = [max(length - 1 - window_left, 0) // block_size for length in lengths]
            kept = [length - skipped * block_size for length, skipped in zip(lengths, blocks, strict=True)]
            return fused.told(kept)

    return fused.attend_captured(
        tasks,
        numbers,
        q.contiguous().unsqueeze(1),
        fused.pages(k_cache),
        fused.pages(v_cache),
        num_kv_heads,
        softmax_scale,
        block_table=tables,
        block_size=block_size,
        **seen,
    ).squeeze(1)


def _windowed(
    tasks: captured.CapturedLengths, tables: Tensor, block_size: int, kv_seqlens: Tensor, left: int
) -> tuple[Tensor, Tensor]:
    """Return block tables cut to the blocks that the window reaches, and the mask of the slots in these blocks.

    A graph's tables have room for all blocks of a cache. A mask for all of them might not fit into the memory.
    """
    width = min(left // block_size + 2, tables.shape[1])
    key = kv_seqlens.data_ptr(), left, block_size, width
    first = tasks.once(
        ("first", *key),
        lambda: (kv_seqlens.long() - 1 - left).clamp(min=0).div(block_size, rounding_mode="floor"),
    )
    near = tasks.once(
        ("tables", tables.data_ptr(), *key),
        lambda: tables.gather(
            1, (first.view(-1, 1) + torch.arange(width, device=first.device)).clamp(max=tables.shape[1] - 1)
        ),
    )
    mask = tasks.once(
        ("mask", *key), lambda: fused.outside(kv_seqlens - first * block_size, left, width * block_size)
    )
    return near, mask
