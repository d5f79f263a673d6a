"""The rewriter: new nodes with fakes and the model's line, replacements with a record."""

import pytest
import torch

from dlinfer.graph.ir.dialect import fake, model_line, op_name
from dlinfer.graph.passes.rewriter import Rewriter
from tests.graph.passes.fusion.capturing import captured

pytestmark = pytest.mark.usefixtures("graph_mode")
aten = torch.ops.aten


def graph():
    one = captured(lambda x: (x * 2 + 1).sin(), torch.ones(3, 5))
    nodes = {op_name(node): node for node in one.graph_module.graph.nodes}
    return one, nodes


def test_new_nodes_have_a_fake_and_the_line_of_where_they_stand():
    one, nodes = graph()
    new = Rewriter(one.graph_module).call(
        nodes["aten.sin"], aten.sum.dim_IntList, nodes["aten.add.Tensor"], [1], True
    )
    assert [str(size) for size in fake(new).shape] == [str(fake(nodes["aten.sin"]).shape[0]), "1"]
    assert model_line(new) == model_line(nodes["aten.sin"]) != ""
    assert new.next is nodes["aten.sin"]


def test_replacing_erases_what_is_unused_and_records_it():
    one, nodes = graph()
    rewriter = Rewriter(one.graph_module)
    mul, add, sin = (nodes[name] for name in ("aten.mul.Tensor", "aten.add.Tensor", "aten.sin"))
    x = mul.args[0]
    new = rewriter.call(sin, aten.cos.default, x)
    rewriter.replace("sin of a line becomes cos", [sin], [new], interior=[mul, add])
    (edit,) = rewriter.edits
    assert (edit.what, edit.removed, edit.added) == (
        "sin of a line becomes cos",
        ("mul", "add", "sin"),
        (new.name,),
    )
    assert edit.line.startswith(__file__)
    torch.testing.assert_close(one.run()[0], torch.ones(3, 5).cos())


def test_interior_nodes_that_others_use_stay():
    one = captured(lambda x: ((x * 2).sin(), x * 2 + 1), torch.ones(3))
    nodes = {op_name(node): node for node in one.graph_module.graph.nodes}
    rewriter = Rewriter(one.graph_module)
    sin = nodes["aten.sin"]
    mul = nodes["aten.mul.Tensor"]  # the second one, which is not sin's
    new = rewriter.call(sin, aten.cos.default, sin.args[0])
    rewriter.replace("cos", [sin], [new], interior=[sin.args[0], mul])
    assert rewriter.edits[0].removed == ("sin",)
    assert mul.users


def test_a_call_that_its_fake_refuses_leaves_the_reason():
    one, nodes = graph()
    with pytest.raises(RuntimeError, match="same reduction dim"):
        Rewriter(one.graph_module).call(
            nodes["aten.sin"], aten.mm.default, nodes["aten.add.Tensor"], nodes["aten.add.Tensor"]
        )
