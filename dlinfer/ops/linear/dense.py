"""Matrix product with a weight as torch.nn.Linear stores it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer import settings
from dlinfer.errors import SettingError
from dlinfer.ops.collective.all_reduce import all_reduce as sum_over_ranks
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

with contextlib.suppress(SettingError):  # the first call raises it; `dlinfer doctor` imports this module
    settings.current()  # read the environment at import: Dynamo traces the call below and can't trace this read

_ROUNDING = "products are summed in float32 and the sum is rounded once, or twice with a bias"
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5, "a float32 sum over in_features, in any order"),
    torch.float16: Tolerance(1e-3, 1e-3, _ROUNDING),
    torch.bfloat16: Tolerance(8e-3, 8e-3, _ROUNDING),
}


@fused_op(tolerances=TOLERANCES)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The torch op behind ``dlinfer.ops.linear``. weight: always [out_features, in_features], whatever the settings."""
    return functional.linear(x, weight, bias)


@linear.python_call
def _call_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, all_reduce: bool = False, group: Any = ""
) -> Tensor:
    """Compute x @ weight.T + bias; with ``all_reduce``, sum the result over a process group.

    x: [..., in_features], weight: [out_features, in_features], bias: [out_features] or None; one floating dtype,
        any strides. With DLINFER_LINEAR_USE_NN_LAYOUT=1 weight must be [in_features, out_features].
    all_reduce: sum the result over ``group``, a torch.distributed.ProcessGroup; "" or None is the default group.

    Returns a new tensor [..., out_features] of x's dtype. Nothing is mutated. Raises OpArgumentError.
    """
    weight = weight.t() if settings.current().linear_use_nn_layout else weight
    return reduced(linear.overload(x, weight, bias), all_reduce, group)


def reduced(out: Tensor, all_reduce: bool, group: Any) -> Tensor:
    """Return ``out``; if ``all_reduce``, sum it in place over ``group`` first."""
    return sum_over_ranks(out, group) if all_reduce else out


linear.takes(
    x="float [..., in_features]",
    weight="like x [out_features, in_features]",
    bias="like x [out_features]",
    returns="like x [..., out_features]",
)


@linear.samples
def _linear_samples(make: SampleMaker) -> Iterator[Sample]:
    def weight(out_features: int, in_features: int) -> Tensor:
        return make.tensor(out_features, in_features, scale=in_features**-0.5)

    yield Sample("one token", (make.tensor(1, 1, 64), weight(48, 64), None))
    yield Sample("many tokens, bias", (make.tensor(1, 33, 64), weight(96, 64), make.tensor(96)))
    yield Sample("no tokens", (make.tensor(1, 0, 32), weight(16, 32), make.tensor(16)))
    yield Sample("odd sizes", (make.tensor(5, 37), weight(19, 37), None))
    yield Sample("strided x", (make.tensor(7, 96)[:, :32], weight(24, 32), None))
    yield Sample(
        "weight stored as [in, out]", (make.tensor(3, 32), weight(24, 32).t().contiguous().t(), None)
    )
