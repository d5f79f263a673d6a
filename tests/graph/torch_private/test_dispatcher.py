"""Kinds of tensors and ops."""

import torch

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
