"""Several linear layers of the same input, such as the q, k and v projections of an attention layer."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.linear.dense import TOLERANCES


@fused_op(tolerances=TOLERANCES)
def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Compute x @ weight.T + bias for each weight and its bias.

    The weights stay separate tensors, without a copy into one. A kernel may still read x once for all weights and
    compute them in one parallel region.

    x: [..., in_features], float32, float16 or bfloat16, any strides.
    weights: at least one, each [out_features, in_features], x's dtype, any strides. out_features may differ.
    biases: one for each weight, [out_features] or None, x's dtype.

    Returns one new tensor [..., out_features] of x's dtype for each weight, in their order. Nothing is mutated.
    Raises OpArgumentError.

    A kernel may sum the products in another order than ``linear``, and then the results may differ in their last bits.
    For normal numbers each result differs from the exact one by at most (in_features + 2) * 2**-24 times the sum of the
    products' magnitudes, plus the roundings to the dtype. The C++ kernels of vendor cpu return the same bits as their
    ``linear`` with each weight.
    """
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


linears.takes(
    x="float [..., in_features]",
)


@linears.check
def _check_linears(
    rules: Rules, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> None:
    rules.require(len(weights) >= 1, "weights", "at least one weight", lambda: len(weights))
    rules.require(
        len(biases) == len(weights),
        "biases",
        lambda: f"{len(weights)}, one for each weight",
        lambda: len(biases),
    )
    for weight, bias in zip(weights, biases, strict=True):
        rules.like("weights", weight, "x", x)
        rules.rank("weights", weight, 2)
        rules.size("weights", weight, 1, x.shape[-1], "the last dimension of x")
        if bias is not None:
            rules.like("biases", bias, "x", x)
            rules.rank("biases", bias, 1)
            rules.size("biases", bias, 0, weight.shape[0], "the first dimension of its weight")


@linears.fake
def _fake_linears(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


@linears.samples
def _linears_samples(make: SampleMaker) -> Iterator[Sample]:
    def weight(out_features: int, in_features: int) -> Tensor:
        return make.tensor(out_features, in_features, scale=in_features**-0.5)

    yield Sample(
        "one token, q k v with biases",
        (
            make.tensor(1, 1, 64),
            [weight(64, 64), weight(16, 64), weight(16, 64)],
            [make.tensor(64), make.tensor(16), make.tensor(16)],
        ),
    )
    yield Sample(
        "many tokens, no bias", (make.tensor(1, 33, 64), [weight(96, 64), weight(96, 64)], [None, None])
    )
    yield Sample("some biases", (make.tensor(5, 32), [weight(24, 32), weight(8, 32)], [None, make.tensor(8)]))
    yield Sample("no tokens", (make.tensor(1, 0, 32), [weight(16, 32), weight(8, 32)], [None, None]))
    yield Sample("odd sizes", (make.tensor(5, 37), [weight(19, 37), weight(1, 37)], [None, None]))
    yield Sample("one weight", (make.tensor(3, 32), [weight(24, 32)], [None]))
    yield Sample(
        "strided x, weight stored as [in, out]",
        (make.tensor(7, 96)[:, :32], [weight(24, 32).t().contiguous().t(), weight(8, 32)], [None, None]),
    )
