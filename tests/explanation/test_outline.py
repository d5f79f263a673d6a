"""The outline of a graph: blocks, layers, and equal layers once."""

from dlinfer.explanation.outline import html_of, outline_of, short_op
from dlinfer.graph.report.report import GraphReport, InputReport, NodeReport


def node(name, reads, place="engine", how="kernel op", module="", op="aten.linear"):
    return NodeReport(name, op, place, how, "", "", "float32[2, 4]", tuple(reads), module)


def stack(layers: int) -> GraphReport:
    """x, then in each layer: norm in a cluster, view, linear with a cache; the residual goes on beside it."""
    inputs = [InputReport("x", "float32[2, 4]", False), InputReport("s0", "s0", False)]
    inputs += [InputReport(f"cache_{i}", "float32[9, 4]", False) for i in range(layers)]
    inputs += [InputReport("weight", "float32[4, 4]", True)]
    nodes, last = [], "x"
    for i in range(layers):
        path = f"model.layers.{i}"
        nodes += [
            node(f"size_{i}", ["x"], "size", ""),
            node(
                f"norm_{i}",
                [last, "weight"],
                how=f"cluster 0123abcd #{i + 1}",
                module=f"{path}.norm",
                op="aten.mul",
            ),
            node(f"view_{i}", [f"norm_{i}"], "view", "", path, "aten.view"),
            node(f"linear_{i}", [f"view_{i}", "weight", f"cache_{i}"], module=f"{path}.proj"),
            node(f"add_{i}", [f"linear_{i}", last], module=path, op="aten.add.Tensor"),
        ]
        last = f"add_{i}"
    nodes.append(node("head", [last], "eager", "", "head"))
    return GraphReport("m", 0, "inductor", inputs=inputs, nodes=nodes, outputs=("head",))


def shown(graph: GraphReport) -> list[tuple[str, int]]:
    return [(layer.title, layer.often) for layer in outline_of(graph)]


def test_kernels_and_clusters_are_blocks_and_views_are_rows():
    blocks = [block for layer in outline_of(stack(1)) for block in layer.blocks]
    assert [(block.kind, block.title, [row.name for row in block.rows]) for block in blocks] == [
        ("cluster", "cluster 0123abcd #1", ["norm_0", "view_0"]),
        ("kernel", "linear", ["linear_0"]),
        ("kernel", "add", ["add_0"]),
        ("eager", "linear", ["head"]),
    ]


def test_two_layers_appear_and_many_equal_ones_are_one():
    assert shown(stack(2)) == [("model.layers.0", 1), ("model.layers.1", 1), ("outside the layers", 1)]
    layer, head = outline_of(stack(24))
    assert (layer.title, layer.often) == ("model.layers.0 … 23", 24)
    assert [block.kind for block in layer.blocks] == ["cluster", "kernel", "kernel"]
    assert [block.kind for block in head.blocks] == ["eager"]
    assert len(html_of(outline_of(stack(24)))) < 2 * len(html_of(outline_of(stack(1))))


def test_a_layer_that_differs_appears_for_itself():
    graph = stack(9)
    changed = next(item for item in graph.nodes if item.name == "linear_4")
    changed.op = "dlinfer.linears"
    assert shown(graph) == [
        ("model.layers.0 … 3", 4),
        ("model.layers.4", 1),
        ("model.layers.5 … 8", 4),
        ("outside the layers", 1),
    ]


def test_the_outline_says_what_is_known_of_each_node():
    text = html_of(outline_of(stack(24)))
    assert "× 24" in text
    assert "runs as cluster 0123abcd #1" in text
    assert "reads view_0, weight, cache_0" in text
    assert html_of(outline_of(GraphReport("m", 0, "inductor"))) == ""


def test_ops_are_named_short():
    names = ("aten.linear", "aten.add.Tensor", "dlinfer.rms_norm", "cond")
    assert [short_op(name) for name in names] == ["linear", "add", "rms_norm", "cond"]
