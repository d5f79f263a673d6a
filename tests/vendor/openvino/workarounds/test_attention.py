"""Attention and what is around it: numbers of OpenVINO, which fuses them."""

import pytest
import torch
import torch.nn.functional as F

from tests.vendor.openvino.lowering import same
from tests.vendor.openvino.test_attention import FIXED, heads

ATTEND = F.scaled_dot_product_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_as_many_heads_as_tokens(causal, dtype):
    """OpenVINO 2026.4.1 takes one for the other where sizes are fixed."""
    given = [one.to(dtype) for one in heads(3, 4, 4, 4, 4)]

    def joined(q, k, v):
        return ATTEND(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    same(joined, *given, fixed=(3, 4, 8))
    same(lambda *each: joined(*(one.transpose(1, 2) for one in each)), *given, fixed=(3, 4, 8))


def gated(q, k, v, x):
    y = x - ATTEND(q, k, v)
    return y * y.abs()


def spelled_out(q, k, v, x):
    y = x + ((q @ k.mT) * 0.3).softmax(-1) @ v
    return y.exp(), y.sin()


def read_itself(q, k, v, x):
    return torch.maximum(ATTEND(q, k, v), x)


@pytest.mark.parametrize("function", [gated, spelled_out, read_itself])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_computed_of_attention_is_read_twice(function, dtype):
    """OpenVINO 2026.4.1 ends the process over such a model: in 16 bits over each, in 32 over some."""
    q, k, v = heads()
    same(function, *(one.to(dtype) for one in (q, k, v, torch.randn_like(q))), fixed=FIXED)


OF_TWO = {
    "compared": lambda q, k, v, x, y: ATTEND(q, k, v) < y,
    "added, then compared": lambda q, k, v, x, y: (ATTEND(q, k, v) + y).sigmoid() < y,
    "transposed, then added": lambda q, k, v, x, y: ATTEND(q, k, v).transpose(1, 2) + x,
    "transposed, then divided by its keys": lambda q, k, v, x, y: (
        ATTEND(y * 0.1, q, q).transpose(1, 2) / q.transpose(1, 2)  # bfloat16 rounds scores of 50 by an eighth
    ),
    "flat, then added": lambda q, k, v, x, y: (
        (ATTEND(q, k, v).transpose(1, 2).float() + x).flatten(2).type_as(q)
    ),
}


@pytest.mark.parametrize("name", OF_TWO)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fixed", [FIXED, (3, 4, 5, 7, 8)])
def test_attention_and_another_tensor(name, fixed, dtype):
    """Behind a transposition, or compared, OpenVINO 2026.4.1 ends the process where sizes are fixed: in 16 bits,
    and divided in 32 too."""
    q, k, v = (one.to(dtype) for one in heads())
    q = q + q.sign()  # divided by smaller ones than 1, a rounding of the attention would grow
    y = torch.full_like(q, 10.0)
    same(OF_TWO[name], q, k, v, torch.randn_like(q.transpose(1, 2)), y, fixed=fixed)
