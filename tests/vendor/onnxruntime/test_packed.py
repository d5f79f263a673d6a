"""Weights of 4 bits: packed as MatMulNBits has them once, whatever the options say, and right to their last group."""

import pytest
import torch

from dlinfer import ops
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised.packing import AWQ
from tests.vendor.onnxruntime.regions import compiled, refused, subgraph

OP = ops.registry()["weight_quant_matmul"]
PARTS = (1, 2, 3)
"""Where qweight, scales and offset stand among the arguments."""
REFUSED = {"nothing to sum": "without elements"}


def region_of_sample(args):
    """(the call as a function of its tensors, these, which of them are weights)."""
    places = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]

    def call(*tensors):
        given = list(args)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return OP.overload(*given)

    static = [index for index, place in enumerate(places) if place in PARTS]
    return call, [args[place] for place in places], static


@pytest.mark.parametrize("kept", ["shared", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_samples(dtype, kept):
    served = 0
    for sample in OP.sample_inputs(SampleMaker(dtype=dtype)):
        call, tensors, static = region_of_sample(sample.args)
        if sample.name in REFUSED:
            (reason,) = refused(subgraph(call, *tensors, static=static)).values()
            assert REFUSED[sample.name] in reason
            continue
        result = compiled(call, *tensors, static=static, weights=kept)
        (got,) = result.run(*tensors)
        assert got.dtype is dtype
        tolerance = OP.tolerances[dtype]
        wanted = OP.reference(*sample.args)
        torch.testing.assert_close(got, wanted, rtol=2 * tolerance.rtol, atol=2 * tolerance.atol)
        assert "MatMulNBits" in result.run.source
        served += 1
    assert served >= 6


@pytest.mark.parametrize("zeros", [True, False], ids=["zero points", "symmetric"])
@pytest.mark.parametrize(
    ("size", "group"),
    [(256, 128), (96, 48), (80, 0), (37, 16), (300, 512), (64, 32), (17, 64), (130, 96)],
    ids=str,
)
def test_groups_and_sizes(size, group, zeros):
    packed = AWQ.of_groups(group).quantise(torch.randn(size, 40) * size**-0.5, torch.float32)
    offset = packed.qzeros if zeros else None

    def layer(x, qweight, scales, offset=None):
        return ops.weight_quant_matmul(x, qweight, scales, offset=offset, group_size=group)

    given = (packed.qweight, packed.scales) + ((offset,) if zeros else ())
    result = compiled(layer, torch.randn(3, size), *given, static=range(1, len(given) + 1))
    for rows in (1, 5, 33):
        x = torch.randn(rows, size)
        wanted = x @ AWQ.of_groups(group).dequantise(packed.qweight, packed.scales, offset)
        torch.testing.assert_close(result.run(x, *given)[0], wanted, rtol=1e-4, atol=1e-4)


def layer(x, qweight, scales, qzeros):
    return ops.weight_quant_matmul(x, qweight, scales, offset=qzeros, group_size=32)


def parts():
    qweight, scales, qzeros = AWQ.of_groups(32).quantise(torch.randn(128, 64), torch.float16)
    assert qzeros is not None
    return [qweight, scales, qzeros]


@pytest.mark.parametrize("level", [0, 1, 4])
def test_what_the_input_may_be_rounded_to(level):
    """Level 4 rounds it to 8 bits, which is why it has to be asked for."""
    given, x = parts(), torch.randn(5, 128)
    result = compiled(layer, x, *given, static=(1, 2, 3), accuracy_level=level)
    assert f"accuracy_level={level}" in result.run.source
    qweight, scales, qzeros = given
    exact = x.double() @ AWQ.of_groups(32).dequantise(qweight, scales.float(), qzeros).double()
    error = ((result.run(x, *given)[0].double() - exact).norm() / exact.norm()).item()
    assert error < 2e-2 if level == 4 else error < 1e-5
    assert error > 1e-4 or level != 4


def test_a_changed_weight_is_packed_anew():
    given, x = parts(), torch.randn(3, 128)
    result = compiled(layer, x, *given, static=(1, 2, 3))
    torch.testing.assert_close(result.run(x, *given)[0], layer(x, *given), rtol=1e-4, atol=1e-4)
    for part, changed in zip(given, parts(), strict=True):
        part.copy_(changed)
        torch.testing.assert_close(result.run(x, *given)[0], layer(x, *given), rtol=1e-4, atol=1e-4)
    assert any("compiled again because weights changed" in note for note in result.notes)


def test_two_layers_of_one_weight_and_one_that_reads_its_scales():
    given = parts()

    def two(x, qweight, scales, qzeros):
        first = ops.weight_quant_matmul(x, qweight, scales, offset=qzeros, group_size=32)
        second = ops.weight_quant_matmul(x * 2, qweight, scales, group_size=32)
        return first + second, scales.float() + 1

    x = torch.randn(4, 128)
    result = compiled(two, x, *given, static=(1, 2, 3))
    for got, wanted in zip(result.run(x, *given), two(x, *given), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_no_weight_is_left_to_torch():
    (reason,) = refused(subgraph(layer, torch.randn(3, 128), *parts(), fixed=True)).values()
    assert "passed at each call" in reason
    small = AWQ.of_groups(8).quantise(torch.randn(128, 64), torch.float16)

    def in_eights(x, *given):
        return ops.weight_quant_matmul(x, given[0], given[1], offset=given[2], group_size=8)

    (reason,) = refused(subgraph(in_eights, torch.randn(3, 128), *small, static=(1, 2, 3))).values()
    assert "not a multiple of 16" in reason


def test_no_tokens_and_numbers_that_are_none():
    given = parts()
    result = compiled(layer, torch.randn(3, 128), *given, static=(1, 2, 3))
    assert result.run(torch.empty(0, 128), *given)[0].shape == (0, 64)
    x = torch.randn(2, 128)
    x[1, 7] = torch.nan
    got = result.run(x, *given)[0]
    assert got[1].isnan().all() and got[0].isfinite().all()
