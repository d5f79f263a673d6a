"""What a step calls is found again by its reference, and does what the op does."""

import operator

import pytest
import torch

from dlinfer.graph.ir import callee
from dlinfer.graph.ir.layout import LAYOUT, laid_out

aten = torch.ops.aten
x = torch.arange(24.0).view(2, 3, 4)

CALLS = [
    (aten.expand.default, (x[:, :1], [2, 5, -1])),
    (aten.expand.default, (x[:, :1], [2, 5, 4])),
    (aten.flatten.using_ints, (x, 0, -2)),
    (aten.flatten.using_ints, (x.mT, 1)),
    (aten.permute.default, (x, [2, 0, -2])),
    (aten.reshape.default, (x, [6, -1])),
    (aten.reshape.default, (x.mT, [24])),
    (aten.reshape.default, (x[:0], [0, 12])),
    (aten.select.int, (x, -1, 2)),
    (aten.split_with_sizes.default, (x, [1, 0, 3], -1)),
    (aten.split_with_sizes.default, (x, [1, 1])),
    (aten.squeeze.dim, (x[:1], 0)),
    (aten.squeeze.dim, (x, -1)),
    (aten.transpose.int, (x, 0, -1)),
    (aten.unflatten.int, (x, -1, [-1, 2])),
    (aten.unflatten.int, (x, 2, [2, 2])),
    (aten.unsqueeze.default, (x, -1)),
    (aten.view.default, (x, [6, -1])),
    (aten.view.default, (x[:0], [0, 7])),
]


def test_each_op_with_a_quick_door_is_tried():
    assert {op for op, _ in CALLS} == set(callee._QUICK)


@pytest.mark.parametrize(("op", "given"), CALLS, ids=lambda one: str(one) if callable(one) else "")
def test_the_quick_door_leads_to_the_same_op(op, given):
    found = callee.resolve(callee.reference(op))
    wanted, made = ([one] if isinstance(one, torch.Tensor) else one for one in (op(*given), found(*given)))
    assert len(wanted) == len(made)
    for one, other in zip(wanted, made, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one, other)
        shared = one.untyped_storage().data_ptr() == given[0].untyped_storage().data_ptr()
        assert (other.untyped_storage().data_ptr() == given[0].untyped_storage().data_ptr()) == shared


@pytest.mark.parametrize("op", callee._QUICK, ids=str)
def test_arguments_behind_the_tensor_have_the_names_of_the_schema(op):
    given = next(args for one, args in CALLS if one is op)
    names = [argument.name for argument in op._schema.arguments]
    named = dict(zip(names[1:], given[1:], strict=False))
    made = callee.resolve(callee.reference(op))(given[0], **named)
    wanted = op(*given)
    torch.testing.assert_close(list(made), list(wanted))


@pytest.mark.parametrize("target", [aten.mm.default, aten.slice.Tensor, operator.mul, torch.sym_not, min])
def test_others_are_themselves(target):
    assert callee.resolve(callee.reference(target)) is target


def test_layouts():
    assert callee.resolve(LAYOUT) is laid_out


@pytest.mark.parametrize(
    "text", ["op aten.no_such.default", "op aten.view.no_such", "py operator.no_such", "py os.x"]
)
def test_what_is_not_there(text):
    with pytest.raises((AttributeError, KeyError)):
        callee.resolve(text)
