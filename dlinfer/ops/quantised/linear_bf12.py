"""Matrix product with a bfloat16 weight, packed in 12 bits a number without loss."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.checks import Rules
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import fused_op
from dlinfer.ops.linear.dense import TOLERANCES, reduced
from dlinfer.ops.quantised import bf12


@fused_op(tolerances=TOLERANCES)
def linear_bf12(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """The torch op behind ``dlinfer.ops.linear_bf12``."""
    plain = bf12.unpack(weight, out_features, x.shape[-1])
    return functional.linear(x, plain.to(x.dtype), bias)


@linear_bf12.python_call
def _call_linear_bf12(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_features: int,
    all_reduce: bool = False,
    group: Any = "",
) -> Tensor:
    """Compute x @ w.T + bias for a packed weight w: the same result as ``dlinfer.ops.linear`` with w before packing.

    x: [..., in_features], float32, float16 or bfloat16, any strides.
    weight: [bytes], uint8, contiguous: w [out_features, in_features], as ``ops.quantised.bf12.pack`` packs it. w is
        multiplied in x's dtype; in float16, numbers below 2 ** -14 are rounded, and those above 65504 are infinite.
    bias: [out_features] or None, x's dtype.
    out_features: the number of rows of w, which the packed bytes do not store.
    all_reduce: sum the result over ``group``, a torch.distributed.ProcessGroup; "" or None is the default group.

    Returns a new tensor [..., out_features] of x's dtype. Nothing is mutated. Raises OpArgumentError.
    """
    return reduced(linear_bf12.overload(x, weight, bias, out_features), all_reduce, group)


linear_bf12.takes(
    x="float [..., in_features]",
    weight="any on x [bytes]",
    bias="like x [out_features]",
    returns="like x [..., out_features]",
)


@linear_bf12.check
def _check_linear_bf12(rules: Rules, x: Tensor, weight: Tensor, out_features: int) -> None:
    rules.require(out_features >= 0, "out_features", "0 or more", lambda: out_features)
    bf12.check_packed(rules, "weight", weight, out_features, x.shape[-1])


@linear_bf12.samples
def _linear_bf12_samples(make: SampleMaker) -> Iterator[Sample]:
    def plain(out_features: int, in_features: int) -> Tensor:
        return make.tensor(out_features, in_features, scale=max(in_features, 1) ** -0.5).bfloat16()

    def packed(out_features: int, in_features: int) -> Tensor:
        return bf12.pack(plain(out_features, in_features))

    yield Sample("one token", (make.tensor(1, 128), packed(48, 128), None, 48))
    yield Sample("many tokens, bias", (make.tensor(1, 33, 256), packed(96, 256), make.tensor(96), 96))
    yield Sample("no tokens", (make.tensor(1, 0, 128), packed(16, 128), make.tensor(16), 16))
    yield Sample("no whole strips and groups", (make.tensor(5, 130), packed(7, 130), make.tensor(7), 7))
    yield Sample("one group that is shorter", (make.tensor(1, 37), packed(1, 37), None, 1))
    yield Sample("nothing to sum", (make.tensor(2, 0), packed(5, 0), make.tensor(5), 5))
    weight = plain(37, 300)
    weight[::3, ::7] *= 1e-30
    weight[1::5, 3::11] = -0.0
    weight[8:12] = 0.0
    weight[20] *= 1e-38  # subnormals among them
    yield Sample("exceptions that are tiny", (make.tensor(3, 300), bf12.pack(weight), make.tensor(37), 37))
    weight, few = plain(26, 200) * 1e-12, plain(26, 200)
    weight[::2, ::9] = few[::2, ::9]
    weight[13] = few[13]
    yield Sample("exceptions that make the result", (make.tensor(1, 200), bf12.pack(weight), None, 26))
    yield Sample("strided", (make.tensor(130, 6).t(), packed(24, 130), make.tensor(24, 2)[:, 0], 24))
    yield Sample("rows of a wider tensor", (make.tensor(7, 384)[:, 128:256], packed(20, 128), None, 20))
