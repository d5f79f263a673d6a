"""Layouts of weights of 4 bits, against LMDeploy's own packer, a word by hand, and each other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdeploy.lite.quantization import WeightQuantizer
from lmdeploy.lite.quantization.modules import WeightOnlyQLinear

from dlinfer.errors import OpArgumentError
from dlinfer.ops.quantised.packing import AWQ, GPTQ, Packing
from examples.tiny_models import awq as tiny_awq

LAYOUTS = {
    "awq": AWQ,
    "awq, symmetric": replace(AWQ, symmetric=True),
    "gptq": GPTQ,
    "gptq, second format": replace(GPTQ, zero_bias=0),
    "eight bits": Packing(bits=8, along="in", order=(0, 1, 2, 3)),
    "bytes": Packing(bits=4, along="out", order=(1, 0), storage=torch.uint8),
}


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(len(shape)))


def test_a_word_of_each_layout_by_hand():
    numbers = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert AWQ.pack(numbers).tolist() == [[0x86427531 - 2**32]]  # places 7..0 hold columns 7 5 3 1 6 4 2 0
    assert GPTQ.pack(numbers.t()).tolist() == [[0x87654321 - 2**32]]
    assert GPTQ.pack_zeros(numbers).tolist() == [[0x76543210]]
    assert LAYOUTS["bytes"].pack(numbers).tolist() == [[0x12, 0x34, 0x56, 0x78]]


def test_awq_is_what_lmdeploy_packs():
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40, dtype=torch.float16)
    quantizer = WeightQuantizer(4, False, "per_group", 32)
    made = WeightOnlyQLinear.from_linear(linear, quantizer, awq_layout=True)
    parameters = quantizer.calculate_qparams(linear.weight)
    scales, zeros = parameters.scales, parameters.zero_points
    numbers = quantizer.quant(linear.weight, parameters, real=True)
    qweight, qzeros = made.qweight, made.qzeros
    assert isinstance(qweight, torch.Tensor)
    assert isinstance(made.scales, torch.Tensor)
    assert isinstance(qzeros, torch.Tensor)
    assert isinstance(zeros, torch.Tensor)
    assert torch.equal(AWQ.unpack(qweight), numbers.t().int())
    assert torch.equal(AWQ.unpack_zeros(qzeros), zeros.squeeze(-1).t().int())
    weight = AWQ.of_groups(32).dequantise(qweight, made.scales, qzeros, torch.float64)
    again = (numbers.view(40, 3, 32).double() - zeros.double()) * scales.double()
    assert torch.equal(weight, again.view(40, 96).t())


def test_awq_is_what_the_tiny_models_hold():
    weight, parts = tiny_awq.rounded(torch.randn(48, 96), 32)
    found = AWQ.of_groups(32).dequantise(parts["qweight"], parts["scales"], parts["qzeros"], torch.float32)
    torch.testing.assert_close(found.t(), weight, rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
@given(words=st.tuples(st.integers(0, 4), st.integers(0, 4)), seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_packing_and_back(name, words, seed):
    packing = LAYOUTS[name]
    shape = [8 * count for count in words]
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(2**packing.bits, shape, generator=generator)
    packed = packing.pack(numbers)
    assert packed.dtype is packing.storage
    assert packed.numel() * packing.per_word == numbers.numel()
    assert torch.equal(packing.unpack(packed), numbers.int())
    zeros = numbers.clamp(min=packing.zero_bias)
    assert torch.equal(packing.unpack_zeros(packing.pack_zeros(zeros)), zeros.int())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("group_size", [0, 16, 40])
def test_a_quantised_weight_is_near(name, group_size):
    packing = LAYOUTS[name].of_groups(group_size)
    weight = torch.randn(96, 32, generator=torch.Generator().manual_seed(1)).double()
    parts = packing.quantise(weight)
    assert parts.scales.shape == (packing.groups(96), 32)
    assert (parts.qzeros is None) == packing.symmetric
    found = packing.dequantise(*parts, torch.float64)
    size = group_size or 96
    steps = parts.scales.double().repeat_interleave(size, 0)[:96]
    # Half a step, one more where a zero point had to be rounded or moved, and the rounding of scales to float16.
    assert ((found - weight).abs() <= steps * 1.51 + weight.abs() * 2.0**-10).all()


def test_the_groups_of_gptq_with_an_order_of_activations():
    packing = GPTQ.of_groups(16)
    parts = packing.quantise(torch.randn(64, 8))
    order = torch.randperm(64)
    group_of = (torch.arange(64) // 16)[order]
    shuffled = packing.pack(packing.unpack(parts.qweight)[order])
    found = packing.dequantise(shuffled, parts.scales, parts.qzeros, group_of=group_of)
    assert torch.equal(found, packing.dequantise(*parts)[order])
    assert found.dtype is torch.float16


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("into", "out"), [(8, 8), (2056, 24), (1032, 1104), (0, 8), (8, 0)])
def test_from_one_layout_to_another(name, target, into, out):
    packing, other = LAYOUTS[name], LAYOUTS[target]
    if packing.bits != other.bits:
        with pytest.raises(OpArgumentError, match=f"a layout of {packing.bits} bits"):
            packing.repack(packing.pack(integers(0, 2, into, out)), other)
        return
    numbers = integers(0, 2**packing.bits, into, out)
    words = packing.pack(numbers)
    found = packing.repack(words, other)
    assert torch.equal(found, other.pack(numbers))
    assert found.is_contiguous()
    assert torch.equal(packing.repack(words.t().contiguous().t(), other), found)
    assert torch.equal(words, packing.pack(numbers))


def test_what_is_no_layout():
    with pytest.raises(OpArgumentError, match=r"argument order: expected each of 0..7 once"):
        Packing(bits=4, along="in", order=(0, 1, 2, 3))
    with pytest.raises(OpArgumentError, match="multiple of 8 in dimension 1, given 12"):
        AWQ.pack(integers(0, 16, 8, 12))
    with pytest.raises(OpArgumentError, match="multiple of 8 in dimension 0, given 12"):
        GPTQ.pack(integers(0, 16, 12, 8))
