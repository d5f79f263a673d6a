"""Rotary embeddings and the gated activation."""

import torch
from torch import Tensor

from dlinfer.vendor.base import refuses
from dlinfer.vendor.camb import layouts, refusing
from dlinfer.vendor.camb.sdk import tmo

_SMALLEST_HEAD, _LARGEST_HEAD = 2, 256
"""The smallest and the largest head size of apply_rotary."""


def _refuses_rotation(x: Tensor) -> str | None:
    size = x.shape[-1]
    if not _SMALLEST_HEAD <= size <= _LARGEST_HEAD:
        return f"apply_rotary supports head sizes from {_SMALLEST_HEAD} to {_LARGEST_HEAD}, not {size}"
    return refusing.floating(x)


@refuses(lambda q, k, cos, sin: _refuses_rotation(q))
def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.numel() == 0:
        return q.new_empty(q.shape), k.new_empty(k.shape)
    sines, cosines = layouts.rows(sin), layouts.rows(cos)
    turned = [_turned(x.reshape(-1, *x.shape[-2:]), sines, cosines, False) for x in (q, k)]
    return turned[0].view(q.shape), turned[1].view(k.shape)


def _turned(x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [tokens, heads, size] by sin and cos [tokens, size] into a new tensor.

    All tokens are passed as one padded sequence. Its token i reads row i of the tables, so no position is looked up.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tmo().apply_rotary(
        layouts.heads(x).unsqueeze(0),
        sin,
        cos,
        None,
        None,
        interleaved,
        False,
        False,
        x.shape[0],
        output=out.unsqueeze(0),
    )
    return out


@refuses(lambda native_input, cos, sin, return_native_layout: _refuses_rotation(native_input))
def apply_rotary_pos_emb_interleaved(
    native_input: Tensor, cos: Tensor, sin: Tensor, return_native_layout: bool
) -> Tensor:
    x, size = native_input, native_input.shape[-1]
    if x.numel() == 0:
        return x.new_empty(x.shape)
    heads = _of_token(x, cos)
    sines, cosines = _of_pairs(sin, x, heads), _of_pairs(cos, x, heads)
    out = _turned(x.reshape(-1, heads, size), sines, cosines, True).view(x.shape)
    if return_native_layout:
        return torch.cat((out[..., 0::2], out[..., 1::2]), dim=-1)
    return out


def _of_token(x: Tensor, table: Tensor) -> int:
    """Return the number of consecutive rows of x that one row of ``table`` rotates: all heads of a token, or 1."""
    if table.dim() == x.dim() and table.shape[0] == x.shape[0] and all(n == 1 for n in table.shape[1:-1]):
        return x[0].numel() // x.shape[-1]
    return 1


def _of_pairs(table: Tensor, x: Tensor, heads: int) -> Tensor:
    """Return the first half of each row of ``table``, with each number twice, for the two elements of a pair.

    The result is [rows, size]. heads: the number of rows of x that one row of ``table`` rotates (``_of_token``).
    """
    size = x.shape[-1]
    half = table[..., : size // 2]
    if heads == 1:
        half = half.expand(*x.shape[:-1], size // 2)
    return half.reshape(-1, size // 2).repeat_interleave(2, dim=-1).contiguous()


@refuses(refusing.floating)
def silu_and_mul(x: Tensor) -> Tensor:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if x.numel() == 0:
        return x.new_empty(shape)
    return tmo().active(layouts.rows(x), "silu", True).view(shape)
