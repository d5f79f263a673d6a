"""Cleaning passes and the pipeline: what they do, what they must not do, and what the verifier refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from dlinfer.errors import PassError
from dlinfer.graph.ir.dialect import op_name
from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.pipeline import Pass, run_passes, verify
from dlinfer.graph.passes.registry import pass_names, passes
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS
from dlinfer.graph.passes.rewriter import Edit
from tests.graph.passes.fakes import stale_fakes
from tests.graph.passes.fusion.capturing import CapturedGraph, captured

pytestmark = pytest.mark.usefixtures("graph_mode")
x = torch.arange(24.0).view(4, 6)


def after(item: Pass, function, *args, dynamic: bool = True) -> tuple[list[str], list[Edit]]:
    """The ops that a pass leaves, and its edits; the results are those from before it."""
    one = captured(function, *args, dynamic=dynamic)
    before = one.run()
    edits = [change for change in item.run(one.graph_module) if isinstance(change, Edit)]
    verify(one.graph_module, item.name, None)
    assert not stale_fakes(one.graph_module)
    torch.testing.assert_close(one.run(), before, check_stride=True)
    nodes = one.graph_module.graph.nodes
    return [
        op_name(n).split(".")[1] for n in nodes if n.op == "call_function" and "sym_" not in op_name(n)
    ], edits


def equal_twice(x):
    return (x * 2).sin() + (x * 2).cos()


def equal_views_twice(x):
    return (x * 2).t().sin() + (x * 2).t().cos()


def other_views_of_an_equal_node(x):
    total = (x * 2).sum()
    first, second = (x * 2).view(-1).split(12)
    return total + first.view(2, 6).sin() + second.view(2, 6).cos()


def across_a_write(x):
    y = x + 0
    a = y * 2
    y.add_(1)
    return a.sin() + (y * 2).cos() + (y * 2).sin()


def across_a_write_to_a_view(x):
    y = x + 0
    a = y.sum()
    y[1].zero_()
    return a * y.sum()


def across_a_write_to_another_input(a, b):
    first = b.sum()
    a.add_(1)
    return first * b.sum()


def one_written_later(x):
    a, b = x * 2, x * 2
    a.add_(1)
    return a.sin() + b.cos()


def both_given_away(x):
    return x * 2, x * 2


def both_given_away_as_views(x):
    return (x * 2).view(-1), (x * 2).t()


def view_reshaped_in_place(x):
    a, b = x.view(6, 4), x.view(6, 4)
    a.t_()
    return a.sin() @ b.cos().t().t()


def same_tensor_reshaped_in_place(x):
    a, b = x.view(6, 4), x.view(6, 4)
    a.float().t_()
    return a.sin() @ b.cos()


def draws(x):
    return torch.rand(4).sum() + torch.rand(4).sum() + x


def numbers(x):
    return x * 1, x * 1.0, x * True, x + 0.0, x + -0.0


@pytest.mark.parametrize(
    ("function", "args", "merged"),
    [
        (equal_twice, [x], 1),
        (equal_views_twice, [x], 2),
        (other_views_of_an_equal_node, [x], 1),
        (across_a_write, [x], 1),
        (across_a_write_to_a_view, [x], 0),
        (across_a_write_to_another_input, [x, x + 1], 0),
        (one_written_later, [x], 0),
        (both_given_away, [x], 0),
        (both_given_away_as_views, [x], 0),
        (view_reshaped_in_place, [x], 0),
        (same_tensor_reshaped_in_place, [x], 0),
        (draws, [x], 0),
        (numbers, [x], 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_merging_equal_nodes(function, args, merged, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(CapturedGraph, "run", _seeded(CapturedGraph.run))
    _, edits = after(CSE, function, *args, dynamic=False)
    assert [edit.what for edit in edits].count("merge equal nodes") == merged


def _seeded(run):
    def seeded(self):
        torch.manual_seed(0)
        return run(self)

    return seeded


def test_dropping_keeps_effects():
    def model(x, m, v):
        torch.rand(3)  # unused, moves the generator
        (x * 3).sin()  # unused
        F.batch_norm(x, m, v, training=True)  # updates statistics
        torch._assert_async(x.sum() > -1)
        y = x + 0
        y.view(-1).add_(1)  # only the write is wanted
        return y

    left, edits = after(DCE, model, x, torch.zeros(6), torch.ones(6))
    assert {"rand", "batch_norm", "_assert_async", "add_"} <= set(left)
    assert not {"mul", "sin"} & set(left)
    assert all(edit.line for edit in edits)


@pytest.mark.parametrize(
    ("function", "dropped"),
    [
        (lambda x: x.to(torch.float32) * 2, 1),
        (lambda x: x.to(torch.float64) * 2, 0),
        (lambda x: x.contiguous().detach().view(4, 6).reshape(4, 6) * 2, 3),
        (lambda x: x.t().contiguous() * 2, 0),
        (lambda x: x.t().to(torch.float32) * 2, 1),
        (lambda x: x.clone() * 2, 0),
        (lambda x: x.to(torch.float32, copy=True) * 2, 0),
        (lambda x: x.view(6, 4) * 2, 0),
        (lambda x: x[:, :] * 2, 1),
        (lambda x: x[1:] * 2, 0),
        (lambda x: x.expand(4, 6) * 2, 1),
        (lambda x: x.expand(2, 4, 6) * 2, 0),
        (lambda x: F.feature_alpha_dropout(x, 0.5, False) * 2, 0),
        (lambda x: x.type_as(x) * 2, 1),
        (lambda x: x.squeeze(0) * 2, 1),
        (lambda x: x.contiguous(), 0),
        (lambda x: (x * 2).detach_() * 2, 1),
        (lambda x: x.view(4, 6).t_() * 2, 0),
        (lambda x: [y := x * 2, y.view(4, 6), y.t_()][1] * 2, 0),
        # x.float() is the very tensor that is squeezed, and the view of it is not
        (lambda x: [y := x[:1, 0] * 2, y.reshape(-1), y.float().squeeze_()][1] * 2, 0),
    ],
)
def test_remove_noops_drops_what_changes_nothing_and_nothing_else(function, dropped):
    one = captured(function, x, dynamic=False)
    count = sum(n.op == "call_function" for n in one.graph_module.graph.nodes)
    left, edits = after(REMOVE_NOOPS, function, x, dynamic=False)
    assert len(edits) == dropped == count - len(left)


def test_sizes_are_compared_as_expressions_without_guards():
    def model(x, y):
        return x.view(x.shape[0], x.shape[1]) * 2, x.view(y.shape[0], y.shape[1]) * 3

    _, edits = after(REMOVE_NOOPS, model, x, x + 1)
    assert len(edits) == 2, "Dynamo gave both inputs the same symbols"


# --- the pipeline


def graph_with_a_write() -> fx.GraphModule:
    def model(x, y):
        x.add_(1)
        y.mul_(2)
        return x.sin() + y

    return captured(model, x.clone(), x.clone()).graph_module


def broken(change) -> Pass:
    def run(graph_module):
        nodes = {op_name(node): node for node in graph_module.graph.nodes if node.op == "call_function"}
        change(graph_module, nodes)
        return []

    return Pass("broken", "it breaks the graph", run)


def uses_before_it_is_made(graph_module, nodes):
    nodes["aten.sin"].append(nodes["aten.add_.Tensor"])


def has_no_fake(graph_module, nodes):
    del nodes["aten.sin"].meta["val"]


def drops_an_input(graph_module, nodes):
    graph_module.graph.find_nodes(op="placeholder")[0]._rename("other")


def reorders_writes(graph_module, nodes):
    nodes["aten.mul_.Tensor"].append(nodes["aten.add_.Tensor"])


def adds_a_write(graph_module, nodes):
    with graph_module.graph.inserting_before(nodes["aten.sin"]):
        new = graph_module.graph.call_function(torch.ops.aten.relu_.default, (nodes["aten.mul_.Tensor"],))
    new.meta["val"] = nodes["aten.mul_.Tensor"].meta["val"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (uses_before_it_is_made, "after broken: .*before"),
        (has_no_fake, "sin.*no fake result"),
        (drops_an_input, "the inputs changed from .*l_x_"),
        (reorders_writes, r"the writes changed from \['aten.add_.Tensor', 'aten.mul_.Tensor'\]"),
        (adds_a_write, "the writes changed .*relu_"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_pass_is_told_by_name(change, message):
    with pytest.raises(PassError, match=message) as caught:
        run_passes(graph_with_a_write(), [broken(change)])
    assert "{'passes': {'broken': False}}" in str(caught.value)


def test_a_broken_pass_can_be_left_out_and_passes_report_what_they_did():
    shown = []
    reports = run_passes(
        graph_with_a_write(),
        [broken(has_no_fake), *passes()],
        disabled={"broken", "remove_noops"},
        show=lambda report, graph_module: shown.append(report.name),
    )
    names = [item.name for item in passes() if item.name != "remove_noops"]
    assert [report.name for report in reports] == shown == names
    assert all(report.why and report.nodes and report.seconds >= 0 for report in reports)


def test_names_of_passes_are_distinct():
    assert len(set(pass_names())) == len(pass_names())
    assert {"remove_noops", "cse", "dce"} <= set(pass_names())
