"""The semantics of the attention ops, their shared argument rules and their reference arithmetic.

Scores of one query head against its group's key head:

- ``s = softmax_scale * (q . k)``
- ``s = cap * tanh(s / cap)`` if logit_softcapping = cap > 0
- ``s = s - alibi_slope * |key position - query position|``
- ``s = -inf`` if the key is not visible
- ``out = sum(exp(s) v) / (sum(exp(s)) + exp(sink))``; without sinks, the term ``exp(sink)`` is left out

A sequence's queries are its last tokens: with q_len queries and kv_len keys, query i has position kv_len - q_len + i
(flash-attention's alignment at the bottom right). A key is visible if -window_left <= key position - query position <=
window_right; a negative window means no bound. If causal, a key after the query is not visible either. The result of a
query that sees no key is zeros. LMDeploy 0.18's CUDA kernels take these steps in the same order and with the
same signs (``pytorch/kernels/cuda/flashattention.py`` and ``pagedattention.py``). Sinks are as in GPT-OSS.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.core.checks import Rules, ints
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
    """Return LMDeploy's ``sliding_window`` as (left, right) in tokens; -1 means no bound.

    A pair is (left, right) as in flash-attention. An int w means (w, w), as in LMDeploy's CUDA backends: a causal
    query sees itself and the w tokens before it. HF transformers' ``sliding_window`` of w sees one token less. None and
    an int below 1 mean no window.
    """
    if sliding_window is None:
        return -1, -1
    if isinstance(sliding_window, int):
        return (sliding_window, sliding_window) if sliding_window > 0 else (-1, -1)
    left, right = sliding_window
    return left, right


def refuse_mask(op: str, attn_mask: Sequence[Tensor | None] | None, causal: bool = True) -> None:
    """Raise UnsupportedFeatureError if ``attn_mask`` has a tensor. LMDeploy's causal template is allowed if ``causal``.

    The template is one causal mask of 2048 x 2048 for sequences of all lengths. LMDeploy's backend for Ascend passes it
    at every prefill, because Ascend's kernel reads it.
    """
    masks = [] if attn_mask is None else [mask for mask in attn_mask if mask is not None]
    if masks and not (causal and all(map(_is_template, masks))):
        raise UnsupportedFeatureError(
            feature="an explicit attn_mask",
            where=f"dlinfer.ops.{op}",
            advice="pass attn_mask=[], and use causal and sliding_window instead of a mask",
        )


_TEMPLATE = 2048  # rows and columns of the template, for all sequence lengths
_templates: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()


def _is_template(mask: Tensor) -> bool:
    """Return whether a mask is LMDeploy's causal template. The values of each mask are compared only once."""
    if tuple(mask.shape) != (_TEMPLATE, _TEMPLATE) or mask.dtype not in (torch.int8, torch.uint8, torch.bool):
        return False
    if _templates.get(id(mask)) is not mask:
        if not torch.equal(mask, torch.ones_like(mask).triu(1)):
            return False
        _templates[id(mask)] = mask
    return True


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """Return ``softmax_scale``, or 1 / sqrt(head_size) if it is None."""
    return float(q.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale


# --- argument rules


def check_heads(rules: Rules, num_q_heads: int, num_kv_heads: int) -> None:
    """Raise OpArgumentError unless the number of query heads is a multiple of the number of KV heads."""
    rules.require(
        num_kv_heads > 0 and num_q_heads % num_kv_heads == 0,
        "num_kv_heads",
        lambda: f"a divisor of num_q_heads = {num_q_heads}",
        lambda: num_kv_heads,
    )


def check_pages(
    rules: Rules, k_cache: Tensor, v_cache: Tensor, block_size: int, num_q_heads: int, num_kv_heads: int
) -> None:
    """Raise OpArgumentError unless the blocks have ``block_size`` slots, and the numbers of heads are right.

    The number of query heads must be a multiple of the number of KV heads.
    """
    check_heads(rules, num_q_heads, num_kv_heads)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        actual = canonical(cache).shape[1]
        expected = f"{actual}, the block size of {name}"
        rules.require(block_size == actual, "block_size", expected, lambda: block_size)


# --- the reference


class Scoring(NamedTuple):
    """The op arguments that change the scores, in the order of the prefill ops."""

    softmax_scale: float
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logit_softcapping: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


def attend_all(
    q: Tensor, q_ends: Tensor, sequences: Iterable[tuple[Tensor, Tensor]], out: Tensor, scoring: Scoring
) -> None:
    """Write the attention of each sequence to its rows of ``out``. Rows after the last sequence are kept.

    sequences: the (keys, values) of each sequence.
    """
    rows: list[Tensor] = []
    start = 0
    for end, (k, v) in zip(ints(q_ends), sequences, strict=True):
        rows.append(attend(q[start:end], k, v, scoring))
        start = end
    if rows:  # ``out`` may be q's memory: write after all of q has been read
        out[:start] = torch.cat(rows)


def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return the attention of one sequence, computed in float32 (float64 for float64) and rounded once.

    q: [q_len, q_heads, head_size], k: [kv_len, kv_heads, head_size], v: [kv_len, kv_heads, head_size_v].
    Returns [q_len, q_heads, head_size_v] of q's dtype.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * scoring.softmax_scale
    if (cap := scoring.logit_softcapping) > 0:
        scores = cap * torch.tanh(scores / cap)
    key_position = torch.arange(k.shape[0], device=q.device)
    query_position = torch.arange(q.shape[0], device=q.device) + (k.shape[0] - q.shape[0])
    distance = key_position - query_position[:, None]
    if scoring.alibi_slopes is not None:
        scores = scores - scoring.alibi_slopes.to(dtype)[:, None, None] * distance.abs()
    scores = scores.masked_fill(~_visible(distance, scoring), -torch.inf)
    if scoring.sinks is not None:  # like one more key, with the sink as its score and the value zero
        sinks = scoring.sinks.to(dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    nothing_seen = (scores == -torch.inf).all(dim=-1, keepdim=True)
    probabilities = scores.softmax(dim=-1).masked_fill(nothing_seen, 0.0)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", probabilities, values).to(q.dtype)


def _visible(distance: Tensor, scoring: Scoring) -> Tensor:
    visible = torch.ones_like(distance, dtype=torch.bool)
    if scoring.causal:
        visible &= distance <= 0
    if scoring.window_left >= 0:
        visible &= distance >= -scoring.window_left
    if scoring.window_right >= 0:
        visible &= distance <= scoring.window_right
    return visible
