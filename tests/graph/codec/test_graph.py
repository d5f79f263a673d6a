"""Graphs as JSON: what is written is read again, and nothing but torch's ops and arithmetic on sizes can be named."""

import copy
import json
import operator
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from dlinfer.graph.capture.export import Exported, read_export
from dlinfer.graph.capture.zero_one_specialization import from_one_on
from dlinfer.graph.codec.arguments import CodecError, decode, encode
from dlinfer.graph.codec.calls import call_text, resolve_call
from dlinfer.graph.codec.graph import Layout, ReadGraph, read_graph, write_graph
from dlinfer.graph.interface.of_graph import interface_of
from dlinfer.graph.report import debug

aten = torch.ops.aten
ROWS = Dim("rows", min=2, max=16)


class Many(nn.Module):
    """Ops with every kind of argument: lists, dtypes, devices, slices, infinities, sizes, several results."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x, y):
        count = x.shape[0]
        a, b = self.linear(x).chunk(2, dim=-1)
        masked = torch.cat([a, b], -1).masked_fill(y > 0, float("-inf"))
        self.seen.add_(x.sum(0))
        positions = torch.arange(count * 2, device=x.device, dtype=torch.int64)[::2]
        return masked.softmax(-1).to(torch.float16), positions.view(count, 1) + count // 2, x[:, 1:-1, None]


def exported(module: nn.Module, *args: torch.Tensor, dynamic_shapes: Any = None) -> Exported:
    program = torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
    return read_export(program, module, args, None)


def written(found: Exported) -> dict[str, Any]:
    """Its JSON, as a file would hold it."""
    captured = found.captured
    graph = captured.graph_module.graph
    interface, _ = interface_of(graph, captured.mode, found.inputs, found.names, found.ranges)
    written, _ = write_graph(captured.graph_module, interface)
    return json.loads(json.dumps(written))


def again(found: Exported, data: Any) -> ReadGraph:
    return read_graph(data, [Layout.of(tensor) for tensor in found.weights], {})


@pytest.fixture(scope="module")
def many() -> Exported:
    rows = {0: ROWS}
    return exported(Many().eval(), torch.randn(5, 8), torch.randn(5, 8), dynamic_shapes=(rows, rows))


@pytest.fixture(scope="module")
def data(many) -> dict[str, Any]:
    return written(many)


def test_the_graph_that_is_read_is_the_one_that_was_written(many, data):
    read = again(many, data)
    assert json.loads(json.dumps(write_graph(read.captured.graph_module, read.interface)[0])) == data
    assert read.writes == {2}
    first = many.captured.graph_module
    second = read.captured.graph_module
    x, y = torch.randn(7, 8), torch.randn(7, 8)
    weights = [tensor.detach().clone() for tensor in many.weights]
    others = [tensor.detach().clone() for tensor in many.weights]
    with torch.no_grad():
        torch.testing.assert_close(second(*others, x, y), first(*weights, x, y), equal_nan=True)
    torch.testing.assert_close(others, weights)


def test_results_inside_have_the_sizes_that_torch_finds(many, data):
    text = debug.text_of(again(many, data).captured.graph_module)
    own = debug.text_of(many.captured.graph_module)
    assert len(text.splitlines()) == len(own.splitlines())
    assert "masked_fill: float32[" in text.replace("masked_fill_1", "masked_fill") or "masked_fill" in text


def test_ops_that_torch_makes_of_others_leave_sizes_open():
    """``aten.pad`` is C++ that calls another op; run on fakes alone it would read the sizes as numbers."""

    class Padded(nn.Module):
        def forward(self, x):
            return torch.nn.functional.pad(x, (1, 0)) * 2

    found = exported(Padded(), torch.ones(5, 3), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    read = again(found, written(found))
    rows, columns = read.symbols.values()
    (padded,) = [
        node.meta["val"] for node in read.captured.graph_module.graph.nodes if node.target is aten.pad.default
    ]
    assert padded.shape == (rows, columns + 1)
    assert not read.interface.conditions


def test_what_reading_assumes_of_a_size_is_a_condition():
    class Doubled(nn.Module):
        def forward(self, x, y):
            return x * 2, y * 2

    shapes = ({0: Dim("n", min=2)}, {0: Dim("m", min=2)})
    found = exported(Doubled(), torch.ones(7, 3), torch.ones(7, 3), dynamic_shapes=shapes)
    text = written(found)
    call = next(node for node in text["nodes"] if node["call"] == "aten::mul.Tensor")
    added = {"name": "added", "call": "aten::add.Tensor", "args": [{"node": "x"}, {"node": "y"}]}
    picked = {"name": "seventh", "call": "aten::view", "args": [{"node": "y"}, [7, 3]]}
    read = again(found, {**text, "nodes": [added, picked, call, *text["nodes"][1:]]})
    assert sorted(map(str, read.interface.conditions)) == ["3*s0 == 21", "s0 == s1"]


def test_lines_of_the_model_stay_without_the_folders_above_them(many, data):
    lines = [item["line"] for item in data["nodes"] if "line" in item]
    assert any("test_graph.py:" in line and "in forward" in line for line in lines)
    assert not any(line.startswith("/") or line.count("/") > 2 for line in lines)


def test_sizes_of_one_may_be_read_as_unknown():
    rows = {0: Dim("any", min=1, max=16)}
    found = from_one_on(exported(nn.Linear(8, 8), torch.randn(5, 8), dynamic_shapes=(rows,)))
    data = written(found)
    assert data["interface"]["symbols"][0]["low"] == 1
    read = again(found, data)
    assert read.interface.conditions == ()


# --- what may be called


@pytest.mark.parametrize(
    "text",
    [
        "builtins.exec",
        "exec",
        "os.system",
        "py os.system",
        "operator.call",
        "operator.methodcaller",
        "operator.pow",
        "torch.load",
        "torch.ops.aten.add",
        "getattr",
        "aten::save",
        "aten::from_file",
        "aten::from_file.out",
        "aten::_print",
        "aten::nothing",
        "aten::add.nothing",
        "aten::add.__class__",
        "aten::__class__",
        "inductor::accumulate_grad_",
        "higher_order::cond",
        "mkldnn::_linear_pointwise",
        "",
        None,
        5,
        ["aten::add.Tensor"],
    ],
)
def test_what_is_no_op_for_graphs_cannot_be_named(text):
    with pytest.raises(CodecError):
        resolve_call(text)


def test_ops_of_other_packages_are_taken_only_when_they_are_trusted():
    with torch.library._scoped_library("testpackage", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        with pytest.raises(
            CodecError, match="testpackage::twice belongs to none of the namespaces aten, prims, dlinfer"
        ):
            resolve_call("testpackage::twice")
        assert resolve_call("testpackage::twice", ["testpackage::twice"])(torch.ones(1)).item() == 2


@pytest.mark.parametrize(
    "target", [exec, print, torch.add, torch.ops.higher_order.cond, os.system, operator.pow]
)
def test_what_has_no_written_form_is_not_written(target):
    with pytest.raises(CodecError, match="cannot be stored"):
        call_text(target)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.squeeze_(0) * 2, "changes the sizes of a tensor in place"),
        (lambda x: x.as_strided((2,), (1,), 0) * 2, "at a fixed storage offset"),
        (lambda x: x[:, 1:].as_strided((2,), (1,), 1) * 2, "at a fixed storage offset"),
    ],
)
def test_what_another_memory_or_other_sizes_would_change_is_not_written(function, why):
    class Module(nn.Module):
        def forward(self, x):
            return function(x)

    with pytest.raises(CodecError, match=why):
        written(exported(Module(), torch.ones(1, 3)))


def with_node(data: dict[str, Any], **node: Any) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    changed["nodes"].append({"name": "more", "args": []} | node)
    return changed


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"call": "builtins.exec", "args": ["raise SystemExit"]}, "is not the name of an op"),
        ({"call": "operator.mul", "args": [[1], 1_000_000_000_000]}, "is only for sizes"),
        ({"call": "operator.add", "args": ["a", "b"]}, "is only for sizes"),
        ({"call": "operator.getitem", "args": [{"node": "x"}, 0]}, "several tensors"),
        ({"call": "round", "args": [1.5], "kwargs": {"ndigits": 2}}, "takes no keywords"),
        (
            {"call": "aten::relu", "args": [{"node": "x"}], "kwargs": {"): import os  #": 1}},
            "has no parameters",
        ),
        ({"call": "aten::relu", "args": [{"node": "nowhere"}]}, "is missing, or comes later"),
        ({"call": "aten::relu", "args": [{"node": "more"}]}, "is missing, or comes later"),
        ({"call": "aten::relu", "args": [5]}, "aten::relu"),
        ({"call": "aten::to.dtype", "args": [{"node": "x"}, {"torch": "load"}]}, "is not a dtype"),
        (
            {"call": "aten::to.dtype", "args": [{"node": "x"}, {"torch": "float32.__class__"}]},
            "is not a dtype",
        ),
        ({"call": "aten::to.device", "args": [{"node": "x"}, {"device": "nowhere"}]}, "is not a device"),
        ({"call": "aten::relu", "args": [{"eval": "1"}]}, "unknown kind"),
        ({"call": "aten::relu", "args": [{"node": "x", "more": 1}]}, "an unknown form"),
        ({"name": "x", "call": "aten::relu", "args": [{"node": "x"}]}, "two nodes have the name x"),
        ({"name": "a b", "call": "aten::relu", "args": [{"node": "x"}]}, "not a valid name of a node"),
        (
            {"name": "a\nimport os", "call": "aten::relu", "args": [{"node": "x"}]},
            "not a valid name of a node",
        ),
        ({"name": "import", "call": "aten::relu", "args": [{"node": "x"}]}, "a Python keyword"),
        ({"constant": 99}, "there is no weight 99"),
        ({"constant": True}, "there is no weight"),
        ({"call": "aten::empty.memory_format", "args": [[1 << 70]]}, "aten::empty"),
    ],
)
def test_nodes_that_no_graph_has_are_refused(many, data, node, why):
    with pytest.raises(CodecError, match=why):
        again(many, with_node(data, **node))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.update(weights=7), "its inputs do not match"),
        (lambda d: d.update(weights="3"), "its inputs do not match"),
        (lambda d: d["inputs"].pop(), "its inputs do not match"),
        (lambda d: d["interface"]["inputs"].pop(), "s0|its inputs do not match"),
        (lambda d: d["interface"]["constants"].append([9, None]), "a constant has a place that no input has"),
        (lambda d: d["interface"]["inputs"][-1].update(sizes=["s0", None]), "unknown size"),
        (lambda d: d["interface"]["inputs"][-1].update(name=5), "is not text"),
        (lambda d: d["interface"]["inputs"][-1].update(offset="0"), "its offset is not an integer"),
        (lambda d: d.update(interface=None), "NoneType"),
        (lambda d: d["interface"]["inputs"][-1].update(sizes=["s0 + os", 8]), "os"),
        (lambda d: d["interface"]["inputs"][-1].update(sizes=["s9", 8]), "s9"),
        (lambda d: d["interface"]["inputs"][-1].update(sizes=["__import__('os')"]), "unknown characters"),
        (lambda d: d["interface"]["inputs"][-1].update(dtype="load"), "is not a dtype"),
        (lambda d: d["interface"]["inputs"][-1].update(device="nowhere"), "is not a device"),
        (lambda d: d["interface"]["symbols"][0].update(low=-1), "has the range"),
        (lambda d: d["interface"]["symbols"][0].update(high=1), "has the range"),
        (lambda d: d["interface"]["symbols"][0].update(hint=99), "above its highest value"),
        (lambda d: d["interface"]["symbols"][0].update(low="2"), "are not integers"),
        (lambda d: d["interface"]["conditions"].append("s0 and s0"), "after the end|no comparison"),
        (lambda d: d["interface"]["conditions"].append("s7 == 1"), "s7"),
        (lambda d: d["outputs"].append([5]), "neither a node nor a plain value"),
        (lambda d: d["outputs"].append({"node": "nowhere"}), "is missing, or comes later"),
        (lambda d: d.pop("nodes"), "nodes"),
        (lambda d: d.update(nodes={}), "a list is missing"),
        (lambda d: d["nodes"].insert(0, None), "NoneType"),
    ],
)
def test_an_invalid_graph_is_refused(many, data, change, why):
    changed = copy.deepcopy(data)
    change(changed)
    with pytest.raises(CodecError, match=why):
        again(many, changed)


def test_a_graph_cannot_lie_about_sizes_inside(many, data):
    """Compiled loops read memory by the sizes of results: they come from torch, so there is nothing to lie with."""
    assert not any("val" in item or "sizes" in item for item in data["nodes"])
    layouts = [Layout.of(tensor) for tensor in many.weights]
    layouts[0] = Layout(torch.float32, (8, 9), (9, 1), torch.device("cpu"))  # the file's own tensor decides
    with pytest.raises(CodecError, match="linear"):
        read_graph(data, layouts, {})


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=9)
        | st.sampled_from([torch.float16, torch.strided, torch.preserve_format, torch.device("cpu", 3)]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.builds(slice, inner, inner, inner)
        ),
        max_leaves=8,
    )
)
def test_arguments_come_back_as_they_were(value):
    text = json.dumps(encode(value), allow_nan=False)
    assert repr(decode(json.loads(text), {})) == repr(value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 65)
    | st.floats()
    | st.sampled_from(
        ["x", "s0", "aten::relu", "linear", "s0 * 2", "operator.mul", "float32", "", "s0 == 2"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["node", "tuple", "torch", "call", "weights", "name", "sizes", "inputs"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


@settings(deadline=None, max_examples=40)
@given(choice=st.data())
def test_any_other_data_is_refused_with_our_error_or_is_a_graph(many, data, choice):
    changed = copy.deepcopy(data)
    for _ in range(choice.draw(st.integers(1, 3))):
        known = places(changed)
        if not known:
            break
        *path, last = choice.draw(st.sampled_from(known))
        owner: Any = changed
        for key in path:
            owner = owner[key]
        if choice.draw(st.booleans()):
            owner[last] = choice.draw(JSON)
        else:
            del owner[last]
    try:
        read = again(many, changed)
    except CodecError:
        return
    read.captured.graph_module.graph.lint()
