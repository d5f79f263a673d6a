"""Scaled dot-product attention by torch's flash kernel for CPU, with the options that this kernel lacks.

``dlinfer.ops.attention.semantics`` explains the formula and its arguments.
``torch.nn.functional.scaled_dot_product_attention`` picks the flash kernel too. The kernel sums in float32, serves
grouped query heads without repeating keys, and returns zeros for a query without visible keys.

Three things are added here. Sinks: the kernel also returns the scores' log-sum-exp ``lse``, and out * exp(lse) /
(exp(lse) + exp(sink)) = out * sigmoid(lse - sink). Head sizes: the kernel needs one size for q, k and v, so smaller
heads are padded. Soft cap: the kernel has none, so scores of a call with a soft cap are computed here, in float32."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True)
class Extras:
    """The options of an attention call.

    slopes: the ALiBi slopes, which broadcast with [batch, heads, queries, keys]; None without ALiBi.
    sinks: broadcasts with [batch, heads, queries]; None without sinks."""

    scale: float
    softcap: float
    slopes: Tensor | None
    sinks: Tensor | None


def attend(
    q: Tensor, k: Tensor, v: Tensor, distance: Tensor, hidden: Tensor | None, extras: Extras
) -> Tensor:
    """Return the attention of q over the keys that are not hidden: a new tensor [batch, heads, queries, size of v].

    q: [batch, heads, queries, size]. k: [batch, kv_heads, keys, size]. v: [batch, kv_heads, keys, size of v].
    distance: key position - query position.
    hidden: bool, or None if no key is hidden. distance and hidden have four dimensions, and broadcast with
        [batch, heads, queries, keys].
    """
    bias = None
    if extras.slopes is not None:
        bias = distance.abs() * -extras.slopes.to(_accumulator(q))
    if hidden is not None:
        start = torch.zeros((), dtype=_accumulator(q)) if bias is None else bias
        bias = start.masked_fill(hidden, -torch.inf)
    if extras.softcap > 0:
        return _explicit(q, k, v, bias, extras)
    return flash(q, k, v, bias, False, extras)


def flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, extras: Extras) -> Tensor:
    """Run torch's flash kernel, and apply sinks. Tensors have the shapes of ``attend``.

    bias: added to the scores, or None. causal: query i sees keys 0..i only."""
    size, size_v = q.shape[3], v.shape[3]
    if size_v < size:
        v = functional.pad(v, (0, size - size_v))
    elif size_v > size:
        q, k = functional.pad(q, (0, size_v - size)), functional.pad(k, (0, size_v - size))
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=bias, scale=extras.scale)
    if extras.sinks is not None:
        out = out * torch.sigmoid(lse - extras.sinks.to(lse.dtype)).to(out.dtype)[..., None]
    return out[..., :size_v]


def _explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, extras: Extras) -> Tensor:
    batch, heads, queries, size = q.shape
    k, v = k.to(_accumulator(q)), v.to(_accumulator(q))
    grouped = q.to(k.dtype).reshape(batch, k.shape[1], -1, size)
    scores = (grouped @ k.transpose(2, 3)).view(batch, heads, queries, -1)
    scores = scores.mul_(extras.scale / extras.softcap).tanh_().mul_(extras.softcap)
    if bias is not None:
        scores = scores.add_(bias)
    highest = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)  # no -inf - -inf
    total = scores.sub_(highest).exp_().sum(dim=-1, keepdim=True)
    if extras.sinks is not None:
        total = total + (extras.sinks.to(scores.dtype)[..., None] - highest).exp()
    out = (scores.view(batch, k.shape[1], -1, k.shape[2]) @ v).view(batch, heads, queries, -1)
    return (out / total.masked_fill_(total == 0, 1.0)).to(q.dtype)  # a query without keys gives zeros


def _accumulator(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
