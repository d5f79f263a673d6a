"""Samples by name: the same numbers in any order of asking, and memory of their own where an op writes."""

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.ops import registry
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.core.samples_in_turn import SamplesInTurn

OPS = registry().values()


def equal(one: tuple, other: tuple) -> bool:
    return all(
        (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride()) and torch.equal(bits(x), bits(y))
        if isinstance(x, Tensor)
        else x == y
        for x, y in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    )


def bits(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.clone().contiguous().untyped_storage())


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_they_are_those_of_the_op_in_any_order_of_asking(op):
    wanted = {one.name: one.args for one in op.sample_inputs(SampleMaker(torch.float32))}
    names, samples = list(wanted), SamplesInTurn()
    for name in (*names, *names, *reversed(names), *(name for name in names for _ in range(3))):
        given = samples.arguments(op, SampleMaker(torch.float32), name)
        assert equal(given, wanted[name])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_no_two_share_memory_that_the_op_writes(op):
    owners: dict[int, str] = {}
    kept = []
    for sample in op.sample_inputs(SampleMaker(torch.float32)):
        kept.append(sample)  # or its memory would be the next one's
        written = [sample.args[op.parameters.index(name)] for name in op.mutates]
        for tensor in filter(
            lambda one: isinstance(one, Tensor) and one.numel(), pytree.tree_leaves(written)
        ):
            assert owners.setdefault(tensor.untyped_storage().data_ptr(), sample.name) == sample.name


def test_each_is_made_once_where_they_are_asked_for_in_turn():
    made = []

    class Op:
        name = "counted"

        def sample_inputs(self, make):
            for sample in registry()["rms_norm"].sample_inputs(make):
                made.append(sample.name)
                yield sample

    op, samples = Op(), SamplesInTurn()
    names = [one.name for one in op.sample_inputs(SampleMaker(torch.float32))]
    made.clear()
    for name in names:
        for _ in range(3):
            samples.arguments(op, SampleMaker(torch.float32), name)  # pyright: ignore[reportArgumentType]
    assert len(made) == 3 * len(names)


def test_a_name_that_there_is_not():
    with pytest.raises(KeyError, match="'rms_norm' has no sample 'x'"):
        SamplesInTurn().arguments(registry()["rms_norm"], SampleMaker(torch.float32), "x")
