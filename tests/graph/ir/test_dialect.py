"""What the dialect says of nodes, each on the smallest graph that shows it."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dlinfer.graph.ir.dialect import (
    STATIC,
    arguments,
    brings_symbol,
    fake,
    is_compute,
    is_pure,
    is_random,
    is_size,
    is_view,
    model_line,
    nodes_in,
    op_name,
    reads_number,
    reshapes_argument,
    storages,
    written_arguments,
)
from tests.graph.passes.fusion.capturing import captured

pytestmark = pytest.mark.usefixtures("graph_mode")

aten = torch.ops.aten
x = torch.arange(24.0).view(4, 6)


def nodes_of(function, *args) -> dict[str, torch.fx.Node]:
    """The last node of each op."""
    graph = captured(function, *args).graph_module.graph
    return {op_name(node): node for node in graph.nodes}


def test_pure_views_writes_and_randomness():
    def model(x, y):
        a = torch.rand(4) + F.dropout(x, 0.5, True).sum()
        x.view(-1).add_(1)
        b, c = torch.split(y, [1, 3])
        return a, b * c[:1], x.reshape(2, -1), y.contiguous()

    found = nodes_of(model, x, x + 1)
    facts = {
        name: "".join(
            letter
            for letter, question in (("p", is_pure), ("v", is_view), ("c", is_compute), ("r", is_random))
            if question(node)
        )
        for name, node in found.items()
        if node.op == "call_function" and not is_size(node)
    }
    wanted = {
        "aten.rand": "cr",
        "aten.dropout": "cr",
        "aten.sum": "pc",
        "aten.view": "pv",
        "aten.add_.Tensor": "c",
        "aten.split_with_sizes": "pv",
        "aten.split.sizes": "pv",
        "_operator.getitem": "pv",
        "operator.getitem": "pv",
        "aten.mul.Tensor": "pc",
        "aten.add.Tensor": "pc",
        "aten.slice.Tensor": "pv",
        "aten.reshape": "pv",
        "aten.contiguous": "pv",
    }
    assert facts == {name: wanted[name] for name in facts}
    assert {"aten.rand", "aten.dropout", "aten.add_.Tensor", "aten.view"} <= set(facts)


@pytest.mark.parametrize("train", [True, False])
def test_dropout_is_random_in_training_only(train):
    found = nodes_of(lambda x: F.feature_alpha_dropout(x, 0.5, train), x)
    node = found["aten.feature_alpha_dropout"]
    assert is_random(node) is train
    assert is_pure(node) is not train


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_attention_is_random_with_dropout_only(p):
    q = torch.randn(1, 2, 4, 8)
    node = nodes_of(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=p), q)[
        "aten.scaled_dot_product_attention"
    ]
    assert is_random(node) is (p > 0)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_its_statistics_in_training_only(training):
    node = nodes_of(
        lambda x, m, v: F.batch_norm(x, m, v, training=training), x, torch.zeros(6), torch.ones(6)
    )["aten.batch_norm"]
    assert [n.name for n in written_arguments(node)] == ["l_m_", "l_v_"] * training
    assert is_pure(node) is not training


def test_written_arguments_of_lists_and_keywords():
    def model(x, y):
        torch._foreach_add_([x, y], 1)
        torch.add(x, 1, out=y)
        return x

    found = nodes_of(model, x.clone(), x.clone())
    assert [n.name for n in written_arguments(found["aten._foreach_add_.Scalar"])] == ["l_x_", "l_y_"]
    (written,) = [
        written_arguments(n) for name, n in found.items() if name in ("aten.add.out", "aten.add_.Tensor")
    ]
    assert len(written) == 1


def test_ops_without_results_are_called_for_an_effect():
    node = nodes_of(lambda x: (torch._assert_async(x.sum() > 0), x * 2)[1], x)["aten._assert_async"]
    assert not is_pure(node)


def test_views_share_storages_and_copies_do_not():
    found = nodes_of(lambda x: (x[1:].t(), x * 2), x)
    placeholder = next(
        n for n in found.values() if n.op == "placeholder" and isinstance(fake(n), torch.Tensor)
    )
    assert storages(found["aten.t"]) == storages(placeholder)
    assert not storages(found["aten.mul.Tensor"]) & storages(placeholder)


def test_numbers():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = nodes_of(lambda x, n: x * n.sum().item() + x.shape[0] * 2, x, torch.tensor([2, 3]))
    item = found["aten.item"]
    sizes = [n for n in found.values() if is_size(n) and n is not item]
    assert sizes
    assert reads_number(item)
    assert not any(reads_number(n) or is_compute(n) for n in sizes)


def test_reshaping_in_place():
    found = nodes_of(lambda x: (x * 2).t_().add_(1), x)
    assert [name for name, node in found.items() if reshapes_argument(node)] == ["aten.t_"]


def test_arguments_by_name_with_defaults():
    node = nodes_of(lambda x: torch.softmax(x, dim=-1), x)["aten.softmax.int"]
    given = arguments(node)
    assert (given["dim"], given["dtype"]) == (-1, None)
    assert given["self"].op == "placeholder"


def test_nodes_in_nested_arguments():
    graph = torch.fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    assert list(nodes_in(([a, {"k": b}], slice(c, None), 1))) == [a, b, c]


def test_parameters_are_static_inputs():
    model = torch.nn.Linear(6, 6)
    graph = captured(model, x).graph_module.graph
    static = {n.name for n in graph.find_nodes(op="placeholder") if n.meta[STATIC]}
    assert len(static) == 2
    assert all("weight" in name or "bias" in name for name in static)


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        ("", ""),
        (
            '  File "/m/a.py", line 3, in outer\n    f()\n  File "/m/b.py", line 7, in inner\n    g()',
            "/m/b.py:7, in inner",
        ),
    ],
)
def test_model_line(trace, line):
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    assert model_line(node) == line


@pytest.mark.parametrize(
    ("op", "arguments", "brings"),
    [
        (aten.index.Tensor, (torch.ones(4, 3), [torch.tensor([0, 2])]), False),
        (aten.index.Tensor, (torch.ones(4, 3), [torch.tensor([True, False, True, True])]), True),
        (aten.nonzero.default, (torch.ones(4),), True),
        (aten.item.default, (torch.ones(()),), True),
        (aten.add.Tensor, (torch.ones(4), torch.ones(4)), False),
    ],
    ids=["index by numbers", "index by a mask", "nonzero", "item", "add"],
)
def test_which_nodes_have_a_result_that_only_running_tells(op, arguments, brings):
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
    graph = fx.Graph()

    def entered(value):
        node = graph.placeholder("x")
        node.meta["val"] = mode.from_tensor(value)
        return node

    args = pytree.tree_map_only(torch.Tensor, entered, arguments)
    node = graph.call_function(op, args)
    with mode:
        node.meta["val"] = op(*map_arg(args, lambda one: one.meta["val"]))
    assert brings_symbol(node) == brings
