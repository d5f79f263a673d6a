"""Attention of one prompt. The vendor's documents allow several sequences in one call only for a few head sizes.

The queries are the sequence's last tokens, and the sequence has at least as many keys as queries. ``graph.calls``
checks this before each run. The eager kernels run all other calls.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.vendor.ascend import refusing
from dlinfer.vendor.ascend.attention import fused
from dlinfer.vendor.ascend.graph.lowerings.decode import pages

_TEMPLATE = 2048  # the side of the mask that sparse mode 3 reads


def _refuses(call: Any) -> str | None:
    if call.q.shape[-1] > fused.LARGEST_HEAD:
        return "only the kernels run prompts over a latent cache"
    if call.q_ends.shape[0] != 1:
        return "a graph runs only one prompt; the kernels run several prompts, one call for each"
    if call.window_left >= 0 or (not call.causal and call.window_right >= 0):
        return "only the kernels run prompts with a window"
    return None


@refusing.where(_refuses)
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
) -> Tensor:
    """Lower to ``FusedInferAttentionScore`` over the prompt's own keys."""
    size, size_v = fused.aligned(max(k.shape[-1], v.shape[-1])), v.shape[-1]
    keys, values = (fused.widened(part, size).unsqueeze(0) for part in (k, v))
    out = _attend(
        fused.widened(q, size),
        keys,
        values,
        q_ends,
        kv_seqlens,
        causal,
        (num_q_heads, num_kv_heads),
        softmax_scale,
    )
    return _written(out[..., :size_v], q_ends, attn_output)


@refusing.where(_refuses)
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
) -> Tensor:
    """Lower to ``FusedInferAttentionScore`` over pages."""
    out = _attend(
        q,
        pages(k_cache),
        pages(v_cache),
        q_ends,
        kv_seqlens,
        causal,
        (num_q_heads, num_kv_heads),
        softmax_scale,
        block_table=block_offsets.to(torch.int32),
        block_size=block_size,
    )
    return _written(out, q_ends, attn_output)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    q_ends: Tensor,
    kv_seqlens: Tensor,
    causal: bool,
    heads: tuple[int, int],
    scale: float,
    **paged: Any,
) -> Tensor:
    seen: dict[str, Any] = {"sparse_mode": 3, "atten_mask": _triangle(q.device)} if causal else {}
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        q.unsqueeze(0),
        keys,
        values,
        actual_seq_lengths=q_ends.to(torch.int64),
        actual_seq_lengths_kv=kv_seqlens.to(torch.int64),
        num_heads=heads[0],
        scale=scale,
        input_layout="BSND",
        num_key_value_heads=heads[1],
        **seen,
        **paged,
    )
    return out.squeeze(0)


def _triangle(device: torch.device) -> Tensor:
    place = torch.arange(_TEMPLATE, device=device)
    return place > place.unsqueeze(-1)


def _written(out: Tensor, q_ends: Tensor, before: Tensor) -> Tensor:
    """Return the new contents of attn_output: rows after the last query stay unchanged."""
    row = torch.arange(out.shape[0], device=out.device)
    return torch.where((row < q_ends).view(-1, 1, 1), out, before)
