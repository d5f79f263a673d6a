"""dlinfer_cpu::linear_silu_and_mul: the bits of the layer and the activation one after the other."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import DTYPES, linear, needs_compiler, tensor

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


@pytest.fixture(scope="module")
def library() -> None:
    assert native.why_not() is None


def together(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.dlinfer_cpu.linear_silu_and_mul.default(x, weight, bias)


def apart(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.dlinfer_cpu.silu_and_mul.default(linear(x, weight, bias))


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.one_of(st.integers(0, 30), st.integers(60, 300)),
    features=st.integers(0, 40),
    in_features=st.integers(0, 1300),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 1, 4864, 896, (0, 0), True, 0)
@example(torch.bfloat16, 8, 96, 2500, (0, 0), False, 0)
@settings(max_examples=100, deadline=None)
def test_bits(dtype, rows, features, in_features, gaps, with_bias, seed):
    x = tensor(seed, (rows, in_features), dtype, gaps[0])
    weight = tensor(seed + 1, (2 * features, in_features), dtype, gaps[1])
    bias = tensor(seed + 2, (2 * features,), dtype) if with_bias else None
    out = together(x, weight, bias)
    assert out.shape == (rows, features)
    assert out.is_contiguous()
    assert torch.equal(out, apart(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_and_copies(dtype):
    x, weight = tensor(0, (3, 2, 100), dtype), tensor(1, (34, 100), dtype)
    assert torch.equal(together(x, weight), apart(x, weight))
    turned = x.transpose(0, 1)
    assert torch.equal(together(turned, weight), apart(turned, weight))
    column_major = weight.T.contiguous().T  # torch's product
    assert torch.equal(together(x, column_major), apart(x, column_major))
    assert torch.equal(together(x[0, 0], weight), apart(x[0, 0], weight))


def test_nan_and_infinity_stay_in_their_outputs():
    x, weight = tensor(0, (3, 70), torch.bfloat16), tensor(1, (40, 70), torch.bfloat16)
    x[1, 3], weight[5, 0], weight[25, 1] = torch.nan, torch.inf, -torch.inf
    out, expected = together(x, weight), apart(x, weight)
    assert out[1].isnan().all()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("rows", [1, 9, 300])
def test_threads_do_not_change_a_bit(rows):
    x, weight = tensor(0, (rows, 200), torch.bfloat16), tensor(1, (90, 200), torch.bfloat16)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(together(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_refusals():
    x, weight = torch.ones(2, 8), torch.ones(6, 8)
    with pytest.raises(RuntimeError, match="2 \\* intermediate"):
        together(x, weight[:5])
    with pytest.raises(RuntimeError, match="in_features"):
        together(x[:, :7], weight)
    with pytest.raises(RuntimeError, match="out_features"):
        together(x, weight, torch.ones(3))
