"""What the three attention ops share: their semantics, argument rules and the reference arithmetic.

Scores of one query head against its group's key head::

    s = softmax_scale * (q . k)
    s = cap * tanh(s / cap)                      where logit_softcapping = cap > 0
    s = s - alibi_slope * |key position - query position|
    s = -inf                                     where the key is not visible
    out = sum(exp(s) v) / (sum(exp(s)) + exp(sink))      the sink only where sinks are given

A sequence's queries are its last tokens: with q_len queries and kv_len keys, query i has position
kv_len - q_len + i (flash-attention's alignment at the bottom right). A key is visible when
-window_left <= key position - query position <= window_right, and not after the query if causal; a negative
bound is none. A query that sees no key gives zeros. Order and signs are those of LMDeploy 0.18's CUDA kernels
(``pytorch/kernels/cuda/flashattention.py`` and ``pagedattention.py``), sinks those of GPT-OSS.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.spec import Tolerance

_ROUNDING = (
    "scores and sums in float32; probabilities may be rounded to the tensors' dtype before they meet v"
)
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5, "float32 sums over head size and keys, in any order"),
    torch.float16: Tolerance(1.5e-3, 1.5e-3, _ROUNDING),
    torch.bfloat16: Tolerance(1.2e-2, 1.2e-2, _ROUNDING),
}


# --- the Python calls


def window(sliding_window: int | Sequence[int] | None) -> tuple[int, int]:
    """(left, right) of LMDeploy's ``sliding_window``; -1 is no bound.

    A pair is flash-attention's. An int w means (w, w), as LMDeploy's CUDA backends read it: a causal query
    sees w tokens before itself, so w + 1 in all, one more than HF transformers' ``sliding_window`` of the
    same value. None, and an int below 1, mean no window.
    """
    if sliding_window is None:
        return -1, -1
    if isinstance(sliding_window, int):
        return (sliding_window, sliding_window) if sliding_window > 0 else (-1, -1)
    left, right = sliding_window
    return left, right


def refuse_mask(op: str, attn_mask: Sequence[Tensor | None] | None, causal: bool = True) -> None:
    """Raise UnsupportedFeatureError when a mask tensor is given, but for one that says no more than ``causal``.

    LMDeploy's backend for Ascend gives the same one at every prefill, whatever the lengths: the template of causal
    attention that the vendor's kernel reads.
    """
    given = [] if attn_mask is None else [mask for mask in attn_mask if mask is not None]
    if given and not (causal and all(map(_is_template, given))):
        raise UnsupportedFeatureError(
            feature="an explicit attn_mask",
            where=f"dlinfer.ops.{op}",
            advice="pass attn_mask=[] and say what is visible by causal and sliding_window",
        )


_TEMPLATE = 2048  # the side of the template, whatever the lengths
_templates: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()


def _is_template(mask: Tensor) -> bool:
    """Whether a mask hides what is above the diagonal, 2048 x 2048. Its values are read once."""
    if tuple(mask.shape) != (_TEMPLATE, _TEMPLATE) or mask.dtype not in (torch.int8, torch.uint8, torch.bool):
        return False
    if _templates.get(id(mask)) is not mask:
        if not torch.equal(mask, torch.ones_like(mask).triu(1)):
            return False
        _templates[id(mask)] = mask
    return True


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The given scale, or 1 / sqrt(head_size)."""
    return float(q.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale


# --- argument rules


def check_queries(rules: Rules, q: Tensor, attn_output: Tensor, num_q_heads: int, num_kv_heads: int) -> None:
    """Rules of q [tokens, q_heads, head_size] and attn_output [tokens, q_heads, head_size_v]."""
    rules.floating("q", q)
    rules.rank("q", q, 3)
    rules.size("q", q, 1, num_q_heads, "num_q_heads")
    rules.require(
        num_kv_heads > 0 and num_q_heads % num_kv_heads == 0,
        "num_kv_heads",
        lambda: f"a divisor of num_q_heads = {num_q_heads}",
        lambda: num_kv_heads,
    )
    rules.like("attn_output", attn_output, "q", q)
    rules.rank("attn_output", attn_output, 3)
    rules.size("attn_output", attn_output, 0, q.shape[0], "the tokens of q")
    rules.size("attn_output", attn_output, 1, num_q_heads, "num_q_heads")


def check_extras(rules: Rules, q: Tensor, alibi_slopes: Tensor | None, sinks: Tensor | None) -> None:
    """Rules of the per-head extras, [q_heads] each."""
    for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if tensor is not None:
            rules.floating(name, tensor)
            rules.same_device(name, tensor, "q", q)
            rules.rank(name, tensor, 1)
            rules.size(name, tensor, 0, q.shape[1], "the heads of q")


def check_lengths(rules: Rules, name: str, lengths: Tensor, sequences: int | torch.SymInt | None) -> None:
    """Rules of a tensor with one integer for each sequence, on any device."""
    rules.integer(name, lengths)
    rules.rank(name, lengths, 1)
    if sequences is not None:
        rules.size(name, lengths, 0, sequences, "the number of sequences")


def check_pages(
    rules: Rules,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    block_size: int,
    kv_seqlens: Tensor,
    num_kv_heads: int,
    attn_output: Tensor,
) -> None:
    """Rules of the paged caches and their tables."""
    for name, cache, size, owner in (
        ("k_cache", k_cache, q.shape[2], "the head size of q"),
        ("v_cache", v_cache, attn_output.shape[2], "the head size of attn_output"),
    ):
        rules.like(name, cache, "q", q)
        rules.rank(name, cache, 4)
        slots = canonical(cache)
        actual = slots.shape[1]
        rules.require(
            block_size == actual, "block_size", f"{actual}, the block size of {name}", lambda: block_size
        )
        rules.size(name, slots, 2, num_kv_heads, "num_kv_heads")
        rules.size(name, slots, 3, size, owner)
    check_tables(rules, q, block_offsets, kv_seqlens)


def check_tables(rules: Rules, q: Tensor, block_offsets: Tensor, kv_seqlens: Tensor) -> None:
    """Rules of the tables that say what stands where in the caches."""
    rules.integer("block_offsets", block_offsets)
    rules.same_device("block_offsets", block_offsets, "q", q)
    rules.rank("block_offsets", block_offsets, 2)
    check_lengths(rules, "kv_seqlens", kv_seqlens, block_offsets.shape[0])


# --- the reference


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    logit_softcapping: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one sequence, in float32 (float64 for float64), rounded once.

    q: [q_len, q_heads, head_size], k: [kv_len, kv_heads, head_size], v: [kv_len, kv_heads, head_size_v].
    Returns [q_len, q_heads, head_size_v] of q's dtype.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * softmax_scale
    if logit_softcapping > 0:
        scores = logit_softcapping * torch.tanh(scores / logit_softcapping)
    key_position = torch.arange(k.shape[0], device=q.device)
    query_position = torch.arange(q.shape[0], device=q.device) + (k.shape[0] - q.shape[0])
    distance = key_position - query_position[:, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[:, None, None] * distance.abs()
    scores = scores.masked_fill(~_visible(distance, causal, window_left, window_right), -torch.inf)
    if sinks is not None:  # one more key, of that score and of value zero
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, q.shape[0], 1)], dim=-1)
    nothing_seen = (scores == -torch.inf).all(dim=-1, keepdim=True)
    probabilities = scores.softmax(dim=-1).masked_fill(nothing_seen, 0.0)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", probabilities, values).to(q.dtype)


def _visible(distance: Tensor, causal: bool, window_left: int, window_right: int) -> Tensor:
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance <= 0
    if window_left >= 0:
        visible &= distance >= -window_left
    if window_right >= 0:
        visible &= distance <= window_right
    return visible
