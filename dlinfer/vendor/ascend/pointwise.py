"""Rotary embeddings and the gated activation."""

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips, layouts, refusing
from dlinfer.vendor.base import refuses

_MOST_HEADS = 999
"""The most heads of npu_rotary_mul. It takes a batch (1 here) and heads below 1000, and head sizes below 896."""
_LARGEST_HEAD = 894


def _refuses_rotation(x: Tensor, heads: int) -> str | None:
    if x.shape[-1] > _LARGEST_HEAD or heads > _MOST_HEADS:
        return (
            f"npu_rotary_mul supports up to {_MOST_HEADS} heads of size {_LARGEST_HEAD}, not {heads} of size "
            f"{x.shape[-1]}"
        )
    return refusing.floating(x)


@refuses(lambda q, k, cos, sin: _refuses_rotation(q, max(q.shape[-2], k.shape[-2])))
def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    size = q.shape[-1]
    if q.numel() == 0:
        return q.new_empty(q.shape), k.new_empty(k.shape)
    tables = [table.reshape(-1, 1, size).contiguous() for table in (cos, sin)]
    # [tokens, heads, size]: LMDeploy's packed q and k are views, so contiguous copies them anyway
    turned = [x.reshape(-1, x.shape[-2], size).contiguous() for x in (q, k)]
    if size in chips.current().rope_sizes:
        # The op writes into its arguments, whatever its schema says: pass copies.
        inputs = [_apart(tensor, x) for tensor, x in zip(turned, (q, k), strict=True)]
        out = torch.ops.npu.npu_apply_rotary_pos_emb(*inputs, *tables, "TND", "half")
    else:
        out = [_turned(x, tables, "half") for x in turned]
    return out[0].view(q.shape), out[1].view(k.shape)


def _apart(tensor: Tensor, x: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() == x.data_ptr() else tensor


def _turned(x: Tensor, tables: list[Tensor], mode: str) -> Tensor:
    """Rotate x [rows, heads, size] with npu_rotary_mul, as one batch in layout BSND.

    tables: cos and sin, each [rows, 1, size]. mode: the op's rotary mode, "half" or "interleave".
    """
    batched = (tensor.unsqueeze(0) for tensor in (x, *tables))
    return torch.ops.npu.npu_rotary_mul(*batched, mode).squeeze(0)


@refuses(
    lambda native_input, cos, sin, return_native_layout: _refuses_rotation(
        native_input, _of_token(native_input, cos)
    )
)
def apply_rotary_pos_emb_interleaved(
    native_input: Tensor, cos: Tensor, sin: Tensor, return_native_layout: bool
) -> Tensor:
    x, size = native_input, native_input.shape[-1]
    if x.numel() == 0:
        return x.new_empty(x.shape)
    heads = _of_token(x, cos)
    tables = [_pairs(table, x, heads) for table in (cos, sin)]
    out = _turned(x.reshape(-1, heads, size).contiguous(), tables, "interleave").view(x.shape)
    if return_native_layout:
        return torch.cat((out[..., 0::2], out[..., 1::2]), dim=-1)
    return out


def _of_token(x: Tensor, table: Tensor) -> int:
    """Return the number of consecutive rows of x that one row of ``table`` rotates.

    This is the number of heads if ``table`` has one row for each token, and 1 if it has a row for each head.
    """
    if table.dim() == x.dim() and table.shape[0] == x.shape[0] and all(n == 1 for n in table.shape[1:-1]):
        return x[0].numel() // x.shape[-1] if x.numel() else 1
    return 1


def _pairs(table: Tensor, x: Tensor, heads: int) -> Tensor:
    """Return the first half of each row of ``table``, with each number twice, for the two elements of a pair.

    The result is [rows, 1, size]. heads: the number of rows of x that one row of ``table`` rotates (``_of_token``).
    """
    size = x.shape[-1]
    half = table[..., : size // 2]
    if heads == 1:
        half = half.expand(*x.shape[:-1], size // 2)
    return half.reshape(-1, 1, size // 2).repeat_interleave(2, dim=-1).contiguous()


def _refuses_silu(x: Tensor) -> str | None:
    return refusing.first((refusing.lacking(chips.current().swiglu, "npu_swiglu"), refusing.floating(x)))


@refuses(_refuses_silu)
def silu_and_mul(x: Tensor) -> Tensor:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if x.numel() == 0:
        return x.new_empty(shape)
    return torch.ops.npu.npu_swiglu(layouts.rows(x), -1).view(shape)
