"""``attn_implementation="dlinfer"``: transformers' attention on dlinfer's ops.

The op ``prefill_attention`` serves prompts. ``paged_decode_attention`` serves decode steps with one query in each
sequence.

In eager mode, the mask is read once in a forward, and split into runs: ranges of queries that one op call can serve
(``mask_runs``). Each op call works on views, so no head is repeated and no key is copied.

Under a compiler, attention calls torch's ``scaled_dot_product_attention``, which graph mode fuses for its engines.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.errors import InferenceOnlyError, UnsupportedFeatureError
from dlinfer.framework.transformers_ext import one_query
from dlinfer.framework.transformers_ext.mask_runs import Run, runs_of

NAME = "dlinfer"

_RUNS = "_dlinfer_runs"
"""The attribute of a mask tensor that caches its runs for the next layers."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention, as transformers' AttentionInterface calls it. Nothing is mutated.

    query: [batch, heads, queries, size]. heads is a multiple of kv_heads.
    key: [batch, kv_heads, keys, size]. value: [batch, kv_heads, keys, value_size]. All three may have any strides.
    attention_mask: [batch or 1, heads or 1, queries, keys]. A bool mask is true if the query sees the key; a floating
        mask is added to the scores. Without a mask, a query sees all keys or, if attention is causal and there are
        several queries, the keys up to its own position.
    scaling: None means 1 / sqrt(size).
    softcap: None or 0 turns it off.
    s_aux: [heads], attention sinks.
    position_bias: added to the scores.

    Returns ([batch, queries, heads, value_size], None). Raises UnsupportedFeatureError for attention weights and
    dropout. Raises InferenceOnlyError if torch records gradients.
    """
    refuse(module, query, key, value, dropout, kwargs)
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and position_bias is None:
        causal = _is_causal(module, is_causal) and queries > 1
        if (
            causal and keys > queries
        ):  # the prefill of a static cache: keys behind the queries are not yet written
            key, value = key[:, :, :queries], value[:, :, :queries]
            keys = queries
        if not torch.compiler.is_compiling():
            run = [Run(0, queries, 0, keys, causal, None)]
            return _by_runs(query, key, value, [run] * query.shape[0], scaling, softcap, s_aux), None
        return _dense(query, key, value, None, causal, scaling, softcap, s_aux), None
    if position_bias is None and attention_mask is not None and not torch.compiler.is_compiling():
        runs = _known_runs(attention_mask)
        if runs is not None and len(runs) in (1, query.shape[0]):
            runs = runs * query.shape[0] if len(runs) == 1 else runs
            return _by_runs(query, key, value, runs, scaling, softcap, s_aux), None
    if position_bias is not None:
        if attention_mask is None and _is_causal(module, is_causal) and queries > 1:
            attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        attention_mask = _with_bias(position_bias, attention_mask)
    return _dense(query, key, value, attention_mask, False, scaling, softcap, s_aux), None


def refuse(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float, kwargs: dict[str, Any]
) -> None:
    """Raise an error for attention weights, dropout and gradients, which the ops do not support."""
    if kwargs.get("output_attentions"):
        raise UnsupportedFeatureError(
            feature="output_attentions=True",
            where='attn_implementation="dlinfer"',
            advice='call model.set_attn_implementation("eager") for attention weights',
        )
    if dropout:
        raise UnsupportedFeatureError(
            feature=f"attention dropout ({dropout})",
            where='attn_implementation="dlinfer"',
            advice="call model.eval(), or train with another attn_implementation",
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise InferenceOnlyError(what=f"attention of {type(module).__name__}")


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _known_runs(mask: Tensor) -> list[list[Run]] | None:
    """Return the runs of the mask; None if the mask does not consist of a few runs.

    The result is cached in the mask tensor, because all layers of a forward get the same mask. Runs of an inference
    tensor are not cached: it has no version counter that would show mutations.
    """
    if mask.is_inference():
        return runs_of(mask)
    known = getattr(mask, _RUNS, None)
    if known is None or known[0] != mask._version:
        known = (mask._version, runs_of(mask))
        setattr(mask, _RUNS, known)
    return known[1]


def _by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: list[list[Run]],
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with one op call for each run. A decode step calls ``one_query`` instead."""
    if one_query.serves(query, runs):
        return one_query.attend(query, key, value, runs, scaling, softcap, sinks)
    batch, heads, queries, _ = query.shape
    whole = all(sum(run.last - run.first for run in sequence) == queries for sequence in runs)
    make = query.new_empty if whole else query.new_zeros
    out = make(batch, queries, heads, value.shape[-1])
    for index, sequence in enumerate(runs):
        q, k, v = (tensor[index].transpose(0, 1) for tensor in (query, key, value))
        for run in sequence:
            count, seen = run.last - run.first, run.end - run.begin
            ops.prefill_attention(
                q[run.first : run.last],
                k[run.begin : run.end],
                v[run.begin : run.end],
                None,
                None,
                torch.tensor([count]),
                torch.tensor([seen]),
                count,
                heads,
                key.shape[1],
                softmax_scale=scaling,
                attn_output=out[index, run.first : run.last],
                causal=run.causal,
                sliding_window=None if run.window is None else (run.window - 1, -1),
                logit_softcapping=softcap,
                sinks=sinks,
            )
    return out


def _with_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with torch's own ops, for compilers and for masks without runs."""
    if not softcap and sinks is None:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).contiguous()
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.to(wide) @ key.to(wide).repeat_interleave(group, dim=1).transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:  # a sink is one more key: its score is the sink, its value zero
        sink = sinks.to(wide).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : key.shape[2]]
    probabilities = torch.nan_to_num(probabilities) if mask is not None else probabilities
    out = probabilities @ value.to(wide).repeat_interleave(group, dim=1)
    return out.to(query.dtype).transpose(1, 2).contiguous()
