"""Experts of 4 bits on the CPU: against the reference in float64, and that weights are neither copied nor widened."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops
from dlinfer.ops.core import fallback
from dlinfer.ops.quantised.packing import AWQ, MXFP4
from dlinfer.vendor.cpu.four_bit import experts as kernels
from dlinfer.vendor.cpu.four_bit import linears
from tests.vendor.cpu.test_native import DTYPES, library, needs_compiler, resident_bytes, tensor

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]
__all__ = ["library"]


def weight(
    generator: torch.Generator, experts: int, rows: int, words: int, group_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Any bits for numbers and zero points, and scales that keep results near 1."""
    groups = AWQ.of_groups(group_size).groups(rows)

    def any_words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).int()

    scales = (torch.rand(experts, groups, words * 8, generator=generator) + 0.5) * 0.2 * rows**-0.5
    return any_words(experts, rows, words), scales.to(dtype), any_words(experts, groups, words)


def parts(
    seed: int,
    experts: int,
    hidden: int,
    intermediate: int,
    group_size: int,
    dtype: torch.dtype,
    zeros: bool = True,
) -> Any:
    generator = torch.Generator().manual_seed(seed)
    gate_up = weight(generator, experts, hidden, intermediate // 4, group_size, dtype)
    down = weight(generator, experts, intermediate, hidden // 8, group_size, dtype)
    return (*gate_up, *down) if zeros else (*gate_up[:2], None, *down[:2], None)


def routes(seed: int, tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    """Of each token any experts, one more than once, too; some have no token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (tokens, topk), generator=generator)
    return torch.rand(tokens, topk, generator=generator) + 0.1, ids


def check(x: Tensor, weights: Any, shares: Tensor, ids: Tensor, renormalize: bool, group_size: int) -> None:
    spec = ops.fused_moe_w4a16
    rest: Any = (shares, ids, ids.shape[1], renormalize, group_size)
    out = kernels.fused_moe_w4a16(x, *weights, *rest)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    want = spec.reference(x.double(), *weights, *rest)
    within = spec.tolerances[x.dtype]
    largest = want.abs().max().item() if want.numel() else 0.0
    # Sums cancel, so that their errors are of the largest numbers.
    torch.testing.assert_close(out.double(), want, rtol=within.rtol, atol=within.atol * max(largest, 1.0))
    assert fallback.counts() == {}


@given(
    dtype=st.sampled_from(DTYPES),
    scales=st.sampled_from(DTYPES),
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    hidden=st.integers(1, 12).map(lambda words: 8 * words),
    intermediate=st.integers(1, 20).map(lambda words: 4 * words),
    topk=st.integers(1, 4),
    group_size=st.sampled_from([0, 1, 8, 32, 64, 1000]),
    gap=st.integers(0, 5),
    renormalize=st.booleans(),
    zeros=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, torch.bfloat16, 1, 9, 96, 64, 4, 32, 0, True, False, 0)
@example(torch.float32, torch.float16, 0, 4, 64, 64, 2, 32, 0, True, True, 0)
@example(torch.float16, torch.float16, 40, 1, 64, 80, 1, 0, 3, False, True, 0)
@settings(max_examples=80, deadline=None)
def test_against_the_reference(
    dtype, scales, tokens, experts, hidden, intermediate, topk, group_size, gap, renormalize, zeros, seed
):
    x = tensor(seed, (tokens, hidden), dtype, gap)
    weights = parts(seed, experts, hidden, intermediate, group_size, scales, zeros)
    check(x, weights, *routes(seed, tokens, experts, topk), renormalize, group_size)


@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    hidden=st.integers(1, 12).map(lambda words: 8 * words),
    intermediate=st.integers(1, 20).map(lambda words: 4 * words),
    topk=st.integers(1, 4),
    limit=st.sampled_from([0.25, 7.0]),
    gap=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_floats_of_4_bits_against_the_reference(
    dtype, tokens, experts, hidden, intermediate, topk, limit, gap, seed
):
    generator = torch.Generator().manual_seed(seed)

    def part(rows: int, columns: int) -> list[Tensor]:
        words = torch.randint(-(2**31), 2**31, (experts, rows, columns // 8), generator=generator).int()
        powers = torch.randint(-3, 0, (experts, MXFP4.groups(rows), columns), generator=generator).double()
        scales = torch.exp2(powers - round(rows**0.25)).bfloat16()
        return [words, scales, torch.randn(experts, columns, generator=generator).to(dtype)]

    x = tensor(seed, (tokens, hidden), dtype, gap)
    weights: Any = (*part(hidden, 2 * intermediate), *part(intermediate, hidden))
    rest: Any = (*routes(seed, tokens, experts, topk), 1.702, limit)
    out = kernels.fused_moe_mxfp4(x, *weights, *rest)
    wide = [one.double() if one.dtype is dtype else one for one in weights]
    want = ops.fused_moe_mxfp4.reference(x.double(), *wide, *rest)
    within, largest = ops.fused_moe_mxfp4.tolerances[dtype], want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(out.double(), want, rtol=within.rtol, atol=within.atol * max(largest, 1.0))
    assert fallback.counts() == {}


def test_experts_that_lie_apart_from_each_other():
    x, weights = tensor(0, (6, 64), torch.bfloat16), parts(0, 8, 64, 32, 32, torch.float16)
    every_other = [one[::2] for one in weights if one is not None]
    check(x, every_other, *routes(0, 6, 4, 2), True, 32)


@pytest.mark.parametrize("rows", [1, 5, 7, 12, 100])
def test_pieces_of_rows_give_what_all_of_them_give(rows, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "_ROWS", rows)  # some cut an expert's rows, some end with them
    check(
        tensor(0, (6, 64), torch.float32),
        parts(0, 4, 64, 32, 32, torch.float16),
        *routes(0, 6, 4, 2),
        True,
        32,
    )


def test_float64_is_served_too():
    x, weights = tensor(0, (6, 64), torch.float64), parts(0, 4, 64, 32, 32, torch.float64)
    shares, ids = routes(0, 6, 4, 2)
    rest: Any = (*weights, shares.double(), ids, 2, True, 32)
    torch.testing.assert_close(kernels.fused_moe_w4a16(x, *rest), ops.fused_moe_w4a16.reference(x, *rest))


def test_the_kernel_in_cpp_reads_each_chosen_expert_where_it_lies(monkeypatch: pytest.MonkeyPatch):
    seen = []
    own = linears.compiled("weight_quant_matmul", torch.zeros(1, dtype=torch.bfloat16))
    assert own is not None

    def watched(x: Tensor, qweight: Tensor, *rest: Any) -> Tensor:
        seen.append((qweight.data_ptr(), x.shape[0]))
        return own(x, qweight, *rest)

    monkeypatch.setattr(linears, "compiled", lambda *given: watched)
    weights = parts(0, 5, 64, 32, 32, torch.float16)
    ids = torch.tensor([[3, 1], [3, 4], [3, 1]])
    x, shares = tensor(0, (3, 64), torch.bfloat16), torch.ones(3, 2)
    rest: Any = (*weights, shares, ids, 2, True, 32)
    kernels.fused_moe_w4a16(x, *rest)
    gate_up, down = weights[0], weights[3]
    expected = [
        (part[expert].data_ptr(), rows)
        for part in (gate_up, down)
        for expert, rows in ((1, 2), (3, 3), (4, 1))
    ]
    assert seen == expected


def test_no_float_copy_of_the_weights_is_made():
    # 24 MiB of words, which are 96 MiB in float16.
    weights = parts(0, 8, 1024, 2048, 128, torch.float16)
    shares, ids = routes(0, 16, 8, 8)
    x = tensor(0, (16, 1024), torch.float16)
    rest: Any = (*weights, shares, ids, 8, True, 128)
    kernels.fused_moe_w4a16(x, *rest)
    before = resident_bytes()
    kept = kernels.fused_moe_w4a16(x, *rest)
    assert resident_bytes() - before < 4 << 20
    assert kept.isfinite().all()
