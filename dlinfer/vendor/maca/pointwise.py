"""Rotary embeddings and the gated activation."""

import torch
from torch import Tensor

from dlinfer.errors import KernelDeclined
from dlinfer.vendor.base import refuses
from dlinfer.vendor.maca import refusing, sdk
from dlinfer.vendor.maca.kept import LastAnswer

_seen: set[bool] = set()
"""Results of all checks so far. A capture cannot read cos and sin, so then these earlier results decide."""


def _agree(cos: Tensor, sin: Tensor) -> bool:
    return _seen == {True} if sdk.capturing() else _agreement.of(cos, sin)


def _halves_agree(cos: Tensor, sin: Tensor) -> bool:
    half = cos.shape[-1] // 2
    agree = all(torch.equal(table[..., :half], table[..., half:]) for table in (cos, sin))
    _seen.add(agree)
    return agree


_agreement = LastAnswer(_halves_agree)
"""Tells whether the two halves of cos and of sin are equal. The vendor's op reads the first halves only."""


@refuses(lambda q, k, cos, sin: refusing.floating(q))
def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    size = q.shape[-1]
    if q.numel() == 0:
        return q.new_empty(q.shape), k.new_empty(k.shape)
    if not _agree(cos, sin):
        raise KernelDeclined(
            reason=(
                "lmdeploy_rotary_embedding reads only the first halves of cos and sin, but the second "
                "halves differ"
            )
        )
    # The op writes into q and k, and needs a token's heads to be dense.
    turned = [refusing.copied_rows(x.reshape(-1, x.shape[-2] * size)) for x in (q, k)]
    positions = torch.arange(turned[0].shape[0], device=q.device)
    tables = (refusing.rows(table) for table in (cos, sin))
    sdk.lmdeploy_ops().lmdeploy_rotary_embedding(positions, *turned, size, *tables, True)
    return turned[0].view(q.shape), turned[1].view(k.shape)


@refuses(refusing.floating)
def silu_and_mul(x: Tensor) -> Tensor:
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if out.numel():
        torch.ops._C.silu_and_mul(out.view(-1, out.shape[-1]), refusing.rows(x))
    return out
