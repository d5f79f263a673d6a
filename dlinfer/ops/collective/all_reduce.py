"""The sum of a tensor over the ranks of a group."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.collective.groups import ALONE, number_of, process_group, register
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op

_ROUNDED = "the sum is in float32, and rounded once"


@fused_op(
    mutates=("x",),
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-6, "ranks may be added in another order"),
        torch.float16: Tolerance(1e-3, 1e-3, _ROUNDED),
        torch.bfloat16: Tolerance(8e-3, 8e-3, _ROUNDED),
    },
)
def all_reduce(x: Tensor, group: int) -> None:
    """The torch op behind ``dlinfer.ops.all_reduce``. Returns nothing.

    group: a number of ``dlinfer.ops.collective.groups``.
    """
    by_torch(x, group)


def by_torch(x: Tensor, group: int) -> None:
    """Sum ``x`` over the ranks in place, with torch.distributed. Tensors of 16 bits are summed in float32."""
    if group == ALONE:
        return
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    total = total.clone(memory_format=torch.contiguous_format) if total is x else total.contiguous()
    torch.distributed.all_reduce(total, group=process_group(group))  # pyright: ignore[reportUnknownMemberType]
    x.copy_(total)


@all_reduce.python_call
def _call_all_reduce(x: Tensor, group: Any = None) -> Tensor:
    """Sum a tensor over all ranks of a group, in place. Every rank gets the same bits.

    x: [...], a floating dtype, any strides; mutated. All ranks must pass the same sizes, and call in the same order.
    group: a torch.distributed.ProcessGroup, or its number; None or "" is the default group.

    Returns x. Raises OpArgumentError. Raises KernelFailureError if the process of a rank has ended.
    """
    all_reduce.overload(x, group if isinstance(group, int) else _number(group))
    return x


def _number(group: Any) -> int:
    if torch.compiler.is_dynamo_compiling():  # a model's groups are registered before compilation
        return number_of(group)
    chosen = group or torch.distributed.group.WORLD
    if chosen is None:
        raise ValueError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first"
        )
    return register(chosen)


all_reduce.takes(x="float [...]")


@all_reduce.samples
def _all_reduce_samples(make: SampleMaker) -> Iterator[Sample]:
    yield Sample("one row", (make.tensor(1, 64), ALONE))
    yield Sample("three dimensions", (make.tensor(2, 3, 5), ALONE))
    yield Sample("no elements", (make.tensor(0, 8), ALONE))
    yield Sample("strided", (make.tensor(6, 4)[:, ::2], ALONE))
