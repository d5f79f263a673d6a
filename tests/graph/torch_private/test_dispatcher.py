"""Kinds of tensors and ops."""

from collections.abc import Iterator

import torch

from dlinfer.graph.ir.dialect import out_of_place, written_parameters
from dlinfer.graph.torch_private import dispatcher, fake_mode
from dlinfer.graph.torch_private.dispatcher import has_registered_effect, is_dispatched


def test_kinds_of_tensors_and_ops():
    from torch.testing._internal.two_tensor import TwoTensor

    assert fake_mode.is_traceable_wrapper_subclass(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not fake_mode.is_traceable_wrapper_subclass(torch.nn.Parameter(torch.ones(2)))
    assert isinstance(torch.ops.higher_order.cond, dispatcher.HigherOrderOperator)


def test_ops_of_the_dispatcher_are_told_from_torchscripts():
    assert is_dispatched("aten::add.Tensor")
    assert is_dispatched("aten::sym_size.int")
    assert not is_dispatched("aten::save")
    assert not is_dispatched("aten::nothing")


def test_names_of_ops():
    names = dispatcher.op_names()
    assert {"aten.add", "aten.add.Tensor", "aten.sin", "prims.convert_element_type"} <= names
    assert not {"aten::add", "aten.nothing"} & names


def test_ops_registered_as_effectful():
    assert has_registered_effect(torch.ops.aten._print.default)
    assert not has_registered_effect(torch.ops.aten.add.Tensor)


def test_an_op_and_its_schema():
    add = torch.ops.aten.add.Tensor
    assert dispatcher.is_op(add)
    assert not dispatcher.is_op(torch.add)
    assert dispatcher.schema_of(add).name == "aten::add"
    assert [parameter.name for parameter in dispatcher.parameters_of(add)] == ["self", "other", "alpha"]


SPECIAL_WRITES = frozenset(
    "__iand__ __ilshift__ __ior__ __irshift__ __ixor__ _index_put_impl_ _sobol_engine_ff_"
    " _sobol_engine_initialize_state_ _sobol_engine_scramble_ add_ copy_ fill_diagonal_ float_power_ floor_divide_"
    " ldexp_ mul_ polygamma_ pow_ record_stream requires_grad_ retain_grad set_data shallow_copy_data_ sort".split()
)
"""Ops of ATen that write their first argument, have no tag that says how, and have an overload without a functional
form. Capture replaces ``shallow_copy_data_`` by ``set_``; no other replaces memory."""


def aten_overloads() -> Iterator[dispatcher.Op]:
    for name in sorted(dispatcher.op_names()):
        space, _, op = name.partition(".")
        if space == "aten" and "." not in op:
            packet = getattr(torch.ops.aten, op)
            yield from (getattr(packet, overload) for overload in packet.overloads())


def test_no_new_op_writes_in_a_way_of_its_own():
    tags = {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}
    special = {
        dispatcher.schema_of(op).name.removeprefix("aten::")
        for op in aten_overloads()
        if (written := written_parameters(op))
        and dispatcher.parameters_of(op)[0].name == written[0]
        and tags.isdisjoint(op.tags)
        and out_of_place(op) is None
    }
    assert special >= SPECIAL_WRITES - {"shallow_copy_data_"}
    assert special <= SPECIAL_WRITES
