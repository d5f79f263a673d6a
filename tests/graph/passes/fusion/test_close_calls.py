"""Code that looks like a pattern and is none, or whose memory lies otherwise than a model's usually does.

Each case names the rule that must not fire, or none where it may and the results must be right all the same, strides
included: loops are compiled for the strides that the graph promises.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.graph.compiling import same_as_eager
from tests.graph.passes.fusion.fusing import all_fired

pytestmark = pytest.mark.usefixtures("graph_mode")


def randn(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def gate_lies_otherwise(gate, up):
    y = up * F.silu(gate.transpose(1, 2))
    return y + 1, y.view(-1)


def gelu_gate_lies_otherwise(gate, up):
    y = up * F.gelu(gate.transpose(1, 2))
    return y + 1, y.view(-1)


def norm_of_what_lies_otherwise(h, w):
    x = h.transpose(0, 1)
    return w * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * x) + 1


def clone_that_keeps_strides(q, k, v):
    o = (torch.softmax(q @ k.mT / 2, -1) @ v).transpose(1, 2).clone()
    return o.transpose(1, 2).view(2, 4, -1)


def keys_with_tokens_last(q, k, v):
    keys = k.transpose(2, 3).repeat_interleave(2, 1)
    o = F.scaled_dot_product_attention(q, keys, v.repeat_interleave(2, 1))
    return o.transpose(1, 2).contiguous().view(2, 5, -1) + 1


def one_query_head_for_all(q, k):
    many = k.repeat_interleave(4, 1)
    return F.scaled_dot_product_attention(q, many, many)


def rotate_half(x):
    return torch.cat((-x[..., 4:], x[..., :4]), -1)


def rotated_twice(x, cos, sin):
    y = x * cos[:, None] + rotate_half(x) * sin[:, None]
    return y * cos[:, None] + rotate_half(y) * sin[:, None]


def table_expanded_for_something_else(q, k, cos, sin):
    extra = cos.expand(2, 4, 5, 8) * 2
    cos, sin = cos[None, None], sin[None, None]
    return extra, q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rounded_logits(x, w):
    logits = F.linear(x, w).to(torch.bfloat16)
    return torch.topk(F.softmax(logits, -1, dtype=torch.float32), 2)


def eight_bits(x8, x):
    return x + x8.to(torch.bfloat16) * 2 + 1


def biases_of_one_number(x, w, b):
    return F.linear(x, w, b) + F.linear(x, w + 1)


Q, KV = (2, 4, 5, 8), (2, 2, 5, 8)
CASES = {
    gate_lies_otherwise: (None, randn(2, 3, 16), randn(2, 16, 3)),
    gelu_gate_lies_otherwise: (None, randn(2, 3, 16), randn(2, 16, 3)),
    norm_of_what_lies_otherwise: (None, randn(5, 3, 16), randn(16)),
    clone_that_keeps_strides: ("written_out_attention", randn(*Q), randn(*Q, seed=1), randn(*Q, seed=2)),
    keys_with_tokens_last: ("grouped_attention", randn(*Q), randn(2, 2, 8, 5), randn(*KV, seed=2)),
    one_query_head_for_all: ("grouped_attention", randn(2, 1, 5, 8), randn(2, 1, 5, 8, seed=1)),
    rotated_twice: ("rotary", randn(*Q), randn(2, 5, 8), randn(2, 5, 8, seed=1)),
    table_expanded_for_something_else: (None, randn(*Q), randn(*KV), randn(5, 8), randn(5, 8, seed=1)),
    rounded_logits: (None, randn(3, 16), randn(6, 16)),
    eight_bits: (None, randn(3, 8).to(torch.float8_e4m3fn), randn(3, 8).bfloat16()),
    biases_of_one_number: ("merged_linears", randn(3, 8), randn(8, 8), randn(1)),
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_by_the_rules(function):
    rule, *args = CASES[function]
    fired, results, wanted = all_fired(function, *args)
    assert rule not in fired
    for result, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_through_the_engine(function):
    same_as_eager(function, *CASES[function][1:], small_regions="engine")
