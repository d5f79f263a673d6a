"""Linear layers of few bits, with the statistics of trained models: kernels against float64, and the loss of a method.

The loss is the norm of the error of the result, divided by the norm of the result of the floats.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8, AwqInt4, BlockedFp8
from dlinfer.ops.quantised import bf12, eight_bit
from tests import trained_statistics as trained
from tests.vendor.cpu import test_native_int4 as int4
from tests.vendor.cpu import test_native_int4_rounded as rounded
from tests.vendor.cpu.test_native import DTYPES, FLOAT32_UNIT, library, needs_compiler
from tests.vendor.cpu.test_native_bf12 import plain_product
from tests.vendor.cpu.test_native_bf12 import product as bf12_product

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]
__all__ = ["library"]

TOKENS, IN, OUT = 64, 1024, 128
MASSIVE = trained.features(IN)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


INPUTS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(1, TOKENS, IN),
    "heavy tails": lambda: trained.heavy_tailed(1, TOKENS, IN),
    "outlier features": lambda: trained.with_outliers(normal(1, TOKENS, IN)),
    "massive activations": lambda: trained.with_massive(normal(1, TOKENS, IN)),
}
WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "heavy tails": lambda: trained.weight(0, OUT, IN),
    "outlier features": lambda: trained.with_outliers(trained.weight(0, OUT, IN)),
    "small rows": lambda: trained.weight(0, OUT, IN) * torch.logspace(0, -4, OUT)[:, None],
}


class Layer(NamedTuple):
    """A kernel's result, and what it multiplied: the inputs and the weight [out, in], rounded, in float64."""

    out: Tensor
    x: Tensor
    weight: Tensor


def int8_layer(x: Tensor, weight: Tensor) -> Layer:
    form = W8A8()
    parts = form.quantise(weight)
    numbers, scale = ops.dynamic_quant(x, torch.int8)
    out = ops.linear_w8a8(numbers, parts["weight"], scale, parts["scale"], x.dtype, torch.int8, None)
    return Layer(out, numbers.double() * scale.double(), form.dequantise(parts).double())


def fp8_layer(x: Tensor, weight: Tensor) -> Layer:
    form = BlockedFp8()
    parts = form.quantise(weight)
    out = ops.linear_blocked_fp8(x, parts["weight"], parts["weight_scale_inv"], None, form.block, False)
    return Layer(
        out, eight_bit.rounded_in_blocks(x, form.block, False).double(), form.dequantise(parts).double()
    )


def int4_parts(weight: Tensor) -> int4.Parts:
    """A weight in groups of 128."""
    parts = AwqInt4().quantise(weight)
    return parts["qweight"], parts["scales"], parts["qzeros"]


def int4_layer(x: Tensor, weight: Tensor) -> Layer:
    qweight, scales, zeros = int4_parts(weight)
    out = ops.weight_quant_matmul(x, qweight, scales, offset=zeros, group_size=128)
    meant = int4.AWQ.of_groups(128).dequantise(qweight, scales, zeros, torch.float64)
    return Layer(out, x.double(), meant.t())


LAYERS = {"int8": int8_layer, "fp8": fp8_layer, "int4": int4_layer}


# --- kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_kernels_compute_what_the_rounded_numbers_say(weights, dtype, library):
    """Massive activations nearly cancel in some results, so magnitudes count, as in ``int4.assert_close``."""
    weight = WEIGHTS[weights]()
    parts, kind = int4_parts(weight), torch.finfo(dtype)
    for x in (make().to(dtype) for make in INPUTS.values()):
        for layer in (int8_layer, fp8_layer):
            for some in (x[:1], x):
                out, kept, meant = layer(some, weight)
                exact, magnitudes = kept @ meant.t(), kept.abs() @ meant.abs().t()
                allowed = (IN + 4) * FLOAT32_UNIT * magnitudes + kind.eps / 2 * exact.abs()
                allowed += kind.smallest_normal * kind.eps
                assert ((out.double() - exact).abs() <= allowed).all(), layer
        for some in (x[:1], x):
            int4.assert_close(int4.product(some, parts, None, 128), some, parts, None, 128)
        if rounded.is_rounding(library, 128, IN):
            out = rounded.rounded_product(x, parts, None, 128)
            rounded.assert_is_of_rounded(out, x, parts, None, 128)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("weights", ["heavy tails", "outlier features"])
def test_bf12_loses_nothing(weights, inputs):
    """The tails of a trained weight hardly have exponents of their own: 12.1 bits instead of 12."""
    weight = WEIGHTS[weights]().bfloat16()
    packed = bf12.pack(weight)
    assert packed.nbytes * 8 < 12.2 * weight.numel()
    for rows in (1, TOKENS):
        x = INPUTS[inputs]()[:rows].bfloat16()
        assert torch.equal(bf12_product(x, packed, None, OUT), plain_product(x, weight))


# --- the loss of each method


def loss(out: Tensor, x: Tensor, weight: Tensor) -> float:
    want = x.double() @ weight.double().t()
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("name", "inputs", "lost"),
    [
        # A step is the row's largest number / 127, so what counts is how large that is beside the others.
        ("int8", "normal", 0.016),
        ("int8", "heavy tails", 0.020),
        ("int8", "outlier features", 0.045),
        # Every number has three bits after its first, and a float8's range is larger than any of these.
        ("fp8", "normal", 0.037),
        ("fp8", "heavy tails", 0.035),
        ("fp8", "outlier features", 0.032),
        # Inputs stay floats, so that what they are does not count.
        ("int4", "normal", 0.13),
        ("int4", "heavy tails", 0.13),
        ("int4", "outlier features", 0.13),
    ],
)
def test_the_loss(name, inputs, lost):
    x, weight = INPUTS[inputs](), WEIGHTS["heavy tails"]()
    assert loss(LAYERS[name](x, weight).out, x, weight) == pytest.approx(lost, rel=0.1)


@pytest.mark.parametrize(("name", "lost"), [("int8", 1.0), ("fp8", 0.036), ("int4", 0.13)])
def test_the_loss_of_a_token_with_massive_activations(name, lost):
    """The weight takes nothing from the massive features, as trained models do: what the others say is compared.

    int8 has one scale for a token. Half of its step is 4000 times the median here, so all other features become 0.
    """
    x, weight = INPUTS["massive activations"](), WEIGHTS["heavy tails"]()
    weight[:, MASSIVE] = 0
    out = LAYERS[name](x, weight).out
    assert loss(out[:1], x[:1], weight) == pytest.approx(lost, rel=0.1)
    others = LAYERS[name](x[1:], weight).out
    assert torch.equal(out[1:], others)  # other tokens lose what they lose alone


def test_the_loss_of_rounded_inputs_of_int4(library):
    """DLINFER_CPU_ACTIVATIONS=int8 has a scale for 128 features: two of eight strips of the first token are lost."""
    if not rounded.is_rounding(library, 128, IN):
        pytest.skip("this build has no VNNI, and rounds no inputs")
    weight = WEIGHTS["heavy tails"]()
    for inputs in ("normal", "heavy tails", "outlier features"):
        x = INPUTS[inputs]()
        out = rounded.rounded_product(x, int4_parts(weight), None, 128)
        assert loss(out, x, weight) == pytest.approx(0.13, rel=0.1)
    x = INPUTS["massive activations"]()
    weight[:, MASSIVE] = 0
    out = rounded.rounded_product(x, int4_parts(weight), None, 128)
    assert loss(out[:1], x[:1], weight) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(("name", "lost"), [("int8", 0.04), ("fp8", 0.1), ("int4", 0.25)])
def test_no_row_of_a_weight_is_lost(name, lost):
    """Rows of a weight that are 10000 times smaller than others keep their meaning."""
    x, weight = INPUTS["normal"](), WEIGHTS["small rows"]()
    out = LAYERS[name](x, weight).out.double()
    want = x.double() @ weight.double().t()
    assert ((out - want).norm(dim=0) / want.norm(dim=0)).max() < lost
