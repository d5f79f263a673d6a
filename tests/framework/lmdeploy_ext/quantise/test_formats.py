"""How far the numbers of a format are from the weight, over weights of many sizes: half a step of their scale."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.formats import (
    FORMATS,
    W8A8,
    AwqInt4,
    BlockedFp8,
    Format,
)

SEEDS = st.integers(0, 2**31)
EXPONENTS = st.integers(-12, 3)


def weight(seed: int, rows: int, columns: int, exponent: int) -> Tensor:
    """Numbers of a bell curve, some of them far out and some 0, around a power of ten."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=generator)
    numbers *= torch.where(torch.rand(rows, columns, generator=generator) < 0.01, 20.0, 1.0)
    numbers *= torch.rand(rows, columns, generator=generator) > 0.05
    return numbers * 10.0**exponent


def error(form: Format, numbers: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    parts = form.quantise(numbers)
    planned = form.parts(*numbers.shape)
    assert {part: tuple(tensor.shape) for part, tensor in parts.items()} == {
        part: shape for part, (_, shape) in planned.items()
    }
    return (form.dequantise(parts).double() - numbers.double()).abs(), parts


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 20), st.integers(1, 3), st.sampled_from([32, 64, 128]), EXPONENTS)
def test_awq_is_half_a_step_away(seed, words, groups, group_size, exponent):
    numbers = weight(seed, 8 * words, group_size * groups, exponent)
    apart, parts = error(AwqInt4(group_size), numbers)
    step = parts["scales"].double().repeat_interleave(group_size, 0).t()
    # The step is rounded to float16, by up to 2 ** -11 or half of the least subnormal number, which 15 steps add up.
    assert (apart <= step * (0.5 + 15 * 2.0**-11) + 15 * 2.0**-25).all()
    in_groups = numbers.double().unflatten(1, (groups, group_size))
    spread = in_groups.amax(-1).clamp(min=0) - in_groups.amin(-1).clamp(max=0)
    least = 2.0**-24
    assert (parts["scales"].double().t() <= (spread / 15 * (1 + 2.0**-11) + least / 2).clamp(min=least)).all()


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 20), st.integers(1, 300), EXPONENTS)
def test_w8a8_is_half_a_step_away(seed, rows, columns, exponent):
    apart, parts = error(W8A8(), weight(seed, rows, columns, exponent))
    assert (apart <= parts["scale"].double() * (0.5 + 127 * 2.0**-22)).all()  # quotients are float32


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 2), st.integers(1, 3), EXPONENTS)
def test_fp8_is_half_a_digit_away(seed, rows, columns, exponent):
    numbers = weight(seed, 128 * rows, 128 * columns, exponent)
    apart, parts = error(BlockedFp8(), numbers)
    scale = parts["weight_scale_inv"].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    # 3 bits after the first; below 2 ** -6 steps are 2 ** -9.
    bound = torch.maximum(numbers.double().abs() * 2.0**-4, scale * 2.0**-10)
    assert (apart <= bound * (1 + 2.0**-18)).all()


def test_names():
    assert {name: made().name for name, made in FORMATS.items()} == {name: name for name in FORMATS}
