"""Attention's heads before a rotation, with the tables and functions of the tests of rotary embeddings."""

import importlib

import torch
from torch import nn

SIZE = 16


class Heads(nn.Module):
    """Query and key as attention has them before the rotation: [batch, heads, tokens, size], views of projections."""

    def __init__(self, rotate, *, heads_first=True):
        super().__init__()
        self.rotate = rotate
        self.heads_first = heads_first

    def forward(self, q, k, cos, sin):
        q, k = (x.view(*x.shape[:2], -1, SIZE) for x in (q, k))
        if self.heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return self.rotate(q, k, cos, sin)


def inputs(dtype=torch.float32, *, tables=None, batch=2, rotated=SIZE):
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 4 * SIZE, dtype=dtype), torch.randn(2, 5, 2 * SIZE, dtype=dtype)
    angles = torch.randn(batch, 5, rotated // 2)
    angles = torch.cat((angles, angles), -1)
    given = q, k, angles.cos().to(tables or dtype), angles.sin().to(tables or dtype)
    for tensor in given:
        torch._dynamo.mark_static(
            tensor, 2
        )  # the sizes of weights are known, those of batch and tokens are not
    return given


def rotation(family, name="apply_rotary_pos_emb"):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def fuses_to_equal_bits(one, fusion, times=1):
    """The fusion fires so often, and results are equal bit by bit, and lie in memory as before."""
    want, strides = one.run(), one.strides()
    assert one.fuse(fusion) == times
    assert all(map(torch.equal, one.run(), want))
    assert one.strides() == strides
