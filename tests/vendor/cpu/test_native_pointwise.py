"""Rotation and gated activations in C++: torch's bits where they are promised, elsewhere float64 within rounding."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from dlinfer import ops
from dlinfer.vendor.cpu import elementwise, gated, native
from tests.vendor.cpu.test_native import needs_compiler, tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers does it, in the tensors' own dtype."""
    first, second = x.chunk(2, -1)
    cos, sin = (table.reshape(*x.shape[:-2], 1, x.shape[-1]) for table in (cos, sin))
    return x * cos + torch.cat((-second, first), -1) * sin


def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.dlinfer_cpu.apply_rotary_pos_emb.default(q, k, cos, sin)


@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 40),
    heads=st.tuples(st.integers(0, 9), st.integers(0, 3)),
    half=st.integers(1, 80),
    gap=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 300, (32, 8), 64, 0, 0)
@example(torch.float32, 1, (14, 2), 32, 0, 0)
@settings(max_examples=150, deadline=None)
def test_rotation_has_the_bits_of_transformers(dtype, tokens, heads, half, gap, seed):
    packed = tensor(seed, (tokens, sum(heads) + 1, 2 * half), dtype, gap)
    q, k = packed[:, : heads[0]], packed[:, heads[0] : sum(heads)]
    cos, sin = (tensor(seed + i, (tokens, 2 * half), dtype, gap) for i in (1, 2))
    for one, given_ in zip(apply(q, k, cos, sin), (q, k), strict=True):
        assert one.is_contiguous()
        assert torch.equal(one, rotated(given_, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_of_batches_and_strides(dtype):
    q, k = tensor(0, (2, 7, 4, 16), dtype), tensor(1, (2, 7, 2, 16), dtype)
    cos, sin = tensor(2, (2, 7, 16), dtype), tensor(3, (14, 16), dtype)
    want = rotated(q, cos, sin), rotated(k, cos, sin)
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    elements_apart = k.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    for queries, keys in ((q, k), (heads_first, k), (q, elements_apart)):
        for one, other in zip(apply(queries, keys, cos, sin), want, strict=True):
            assert torch.equal(one, other)
    expanded = cos[:1, :1].expand(2, 7, 16)
    assert torch.equal(apply(q, k, expanded, expanded)[0], rotated(q, expanded, expanded))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_of_numbers_that_are_none(dtype):
    q = tensor(0, (4, 2, 40), dtype)
    q[1, 0, 3], q[2, 1, 39], q[3, 0, 0] = torch.nan, torch.inf, torch.finfo(dtype).max
    cos, sin = tensor(1, (4, 40), dtype).abs() + 2, tensor(2, (4, 40), dtype)
    got, want = apply(q, q[:, :1], cos, sin)[0], rotated(q, cos, sin)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(1.0), want.nan_to_num(1.0))


def test_rotation_refuses_what_does_not_fit():
    q, k, cos = torch.ones(3, 2, 8), torch.ones(3, 1, 8), torch.ones(3, 8)
    for call in (
        (q, k[:2], cos, cos),
        (q, k[..., :6], cos, cos),
        (q[..., :7], k[..., :7], cos[:, :7], cos[:, :7]),
        (q, k, cos[:2], cos),
        (q, k, cos, cos.bfloat16()),
        (q[0], k[0], cos, cos),
    ):
        with pytest.raises(RuntimeError, match="apply_rotary_pos_emb: "):
            apply(*call)


# --- gated activations


def both(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.dlinfer_cpu.silu_and_mul.default(torch.cat([gate, up], -1))


def assert_rounded(got: Tensor, activated: Tensor, up: Tensor) -> None:
    """Two roundings to the dtype, and in float32 some units of the exponential and, in the tail, of its argument."""
    half, kind = got.dtype in HALF, torch.finfo(got.dtype)
    exact = activated * up.double()
    units = 1.01 if half else 12 + 4 * (activated.abs() + 1e-45).log().abs()
    # Where the activation itself is below the normal numbers, its spacing; and exp is 0 below -87.3.
    least = kind.smallest_normal * (kind.eps if half else 1) + 1.2e-36
    assert (
        (got.double() - exact).abs() <= units * kind.eps * exact.abs() + least * (up.double().abs() + 1)
    ).all()


def silu(x: Tensor) -> Tensor:
    return x.double() * x.double().sigmoid()


def gelu(x: Tensor) -> Tensor:
    wide = x.double()
    return wide * (2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)).sigmoid()


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 40),
    size=st.integers(0, 300),
    gaps=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    scale=st.sampled_from([0.01, 1.0, 10.0, 60.0]),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 40, 4864, (0, 0), 1.0, 0)
@settings(max_examples=150, deadline=None)
def test_gated_activations_against_float64(dtype, rows, size, gaps, scale, seed):
    gate, up = (tensor(seed + i, (rows, size), dtype, gaps[i]) * scale for i in range(2))
    one = torch.ops.dlinfer_cpu.silu_mul.default(gate, up)
    assert one.is_contiguous()
    assert_rounded(one, silu(gate), up)
    assert torch.equal(both(gate, up), one)
    assert_rounded(torch.ops.dlinfer_cpu.gelu_mul.default(gate, up), gelu(gate), up)


@pytest.mark.parametrize(("dtype", "others"), [(torch.bfloat16, 0), (torch.float16, 2)])
def test_silu_of_every_number_has_the_bits_of_torch(dtype, others):
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    gate = gate[(gate > -87) | gate.isnan()]
    up = torch.full_like(gate, 0.75)
    got, want = torch.ops.dlinfer_cpu.silu_mul.default(gate, up), functional.silu(gate) * up
    assert torch.equal(got.isnan(), want.isnan())
    assert (got.nan_to_num(0.0) != want.nan_to_num(0.0)).sum() <= others


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_at_the_ends(dtype):
    gate = torch.tensor([torch.inf, torch.nan, 1000.0, -1000.0, 0.0, -0.0] * 7, dtype=dtype)
    up = torch.full_like(gate, 2.0)
    want = torch.tensor([torch.inf, torch.nan, 2000.0, 0.0, 0.0, 0.0] * 7, dtype=dtype)
    for got in (
        both(gate, up),
        torch.ops.dlinfer_cpu.silu_mul.default(gate, up),
        torch.ops.dlinfer_cpu.gelu_mul.default(gate, up),
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_gate_and_up(dtype):
    gate, up = tensor(0, (3, 5, 4, 24), dtype), tensor(1, (3, 5, 4, 24), dtype)
    silu_mul = torch.ops.dlinfer_cpu.silu_mul.default
    want = silu_mul(gate, up)
    for dims in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3)):
        turned = up.transpose(*dims).contiguous().transpose(*dims)
        assert torch.equal(silu_mul(gate, turned), want)
        assert torch.equal(silu_mul(turned, gate), silu_mul(up, gate))
    assert torch.equal(silu_mul(gate[0, 0, 0], up[0, 0, 0]), want[0, 0, 0])
    wide = torch.cat([gate, up], -1).transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(torch.ops.dlinfer_cpu.silu_and_mul.default(wide), want)


def test_gated_activations_refuse_what_does_not_fit():
    x = torch.ones(3, 8)
    for call in ((x, x[:2]), (x, x[:, :4]), (x, x.bfloat16()), (x[0, 0], x[0, 0]), (x.double(), x.double())):
        with pytest.raises(RuntimeError, match="gated: "):
            torch.ops.dlinfer_cpu.silu_mul.default(*call)
    with pytest.raises(RuntimeError, match="silu_and_mul: "):
        torch.ops.dlinfer_cpu.silu_and_mul.default(x[:, :7])


# --- all of them


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(dtype):
    q, k = tensor(0, (150, 8, 64), dtype), tensor(1, (150, 2, 64), dtype)
    cos, sin, gate = tensor(2, (150, 64), dtype), tensor(3, (150, 64), dtype), tensor(4, (77, 1000), dtype)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((*apply(q, k, cos, sin), torch.ops.dlinfer_cpu.gelu_mul.default(gate, gate)))
    finally:
        torch.set_num_threads(before)
    for one in results:
        assert all(torch.equal(a, b) for a, b in zip(one, results[0], strict=True))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_the_library_torch_computes_the_same(dtype, monkeypatch):
    for module in (elementwise, gated):
        monkeypatch.setattr(module, "compiled", lambda *given: None)
    x, up = tensor(0, (5, 24), dtype), tensor(1, (5, 24), dtype)
    unit = 4 * torch.finfo(dtype).eps
    by: dict[str, Any] = {"rtol": unit, "atol": unit}
    torch.testing.assert_close(gated.silu_mul(x, up).double(), silu(x) * up.double(), **by)
    torch.testing.assert_close(gated.gelu_mul(x, up, True).double(), gelu(x) * up.double(), **by)
    halves = elementwise.silu_and_mul(torch.cat([x, up], -1))
    torch.testing.assert_close(halves, gated.silu_mul(x, up), **by)
    q, k = x.view(5, 3, 8), up.view(5, 3, 8)
    for one, given_ in zip(elementwise.apply_rotary_pos_emb(q, k, x[:, :8], up[:, :8]), (q, k), strict=True):
        assert torch.equal(one, rotated(given_, x[:, :8], up[:, :8]))


def test_the_exact_gelu_is_torchs():
    gate, up = torch.randn(3, 40), torch.randn(3, 40)
    assert torch.equal(ops.gelu_mul(gate, up, False), functional.gelu(gate) * up)


def test_opcheck():
    q, k, cos = tensor(0, (3, 4, 8), torch.bfloat16), tensor(1, (3, 2, 8), torch.bfloat16), torch.ones(3, 8)
    torch.library.opcheck(
        torch.ops.dlinfer_cpu.apply_rotary_pos_emb.default, (q, k, cos.bfloat16(), cos.bfloat16())
    )
    torch.library.opcheck(torch.ops.dlinfer_cpu.silu_and_mul.default, (torch.randn(2, 3, 8),))
    for op in (torch.ops.dlinfer_cpu.silu_mul.default, torch.ops.dlinfer_cpu.gelu_mul.default):
        torch.library.opcheck(op, (torch.randn(2, 3, 8), torch.randn(2, 3, 8)))
