"""What of a graph is drawn, and that the layout keeps boxes apart and edges going down."""

import random

from dlinfer.explanation.drawing import drawing_of, short_op
from dlinfer.explanation.layout import layout
from dlinfer.explanation.svg import svg_of
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


def test_kernels_clusters_and_inputs_are_boxes_and_views_are_rows():
    drawing = drawing_of(stack(1))
    assert [(box.kind, box.title, [row.name for row in box.rows]) for box in drawing.boxes] == [
        ("input", "x", ["x"]),
        ("input", "cache_0", ["cache_0"]),
        ("cluster", "cluster 0123abcd #1", ["norm_0", "view_0"]),
        ("kernel", "linear", ["linear_0"]),
        ("kernel", "add", ["add_0"]),
        ("eager", "linear", ["head"]),
        ("output", "output", []),
    ]
    title = {box.number: box.rows[0].name if box.rows else "output" for box in drawing.boxes}
    assert sorted((title[a], title[b]) for a, b in drawing.edges) == [
        ("add_0", "head"),
        ("cache_0", "linear_0"),
        ("head", "output"),
        ("linear_0", "add_0"),
        ("norm_0", "linear_0"),
        ("x", "add_0"),
        ("x", "norm_0"),
    ]


def test_two_layers_are_drawn_and_many_equal_ones_are_one():
    assert [(f.title, f.often) for f in drawing_of(stack(2)).frames] == [
        ("model.layers.0", 1),
        ("model.layers.1", 1),
    ]
    drawing = drawing_of(stack(24))
    (frame,) = drawing.frames
    assert (frame.title, frame.often) == ("model.layers.0 … 23", 24)
    kinds = sorted(box.kind for box in frame.boxes)
    assert kinds == ["cluster", "input", "kernel", "kernel"]  # a cache for each layer stands inside
    assert [box.title for box in drawing.boxes if box.kind == "input"] == ["x", "cache_0"]
    assert len(svg_of(stack(24))) < 2 * len(svg_of(stack(1)))


def test_a_layer_that_differs_is_drawn_for_itself():
    graph = stack(9)
    changed = next(item for item in graph.nodes if item.name == "linear_4")
    changed.op = "dlinfer.linears"
    titles = [(f.title, f.often) for f in drawing_of(graph).frames]
    assert titles == [("model.layers.0 … 3", 4), ("model.layers.4", 1), ("model.layers.5 … 8", 4)]


def test_the_drawing_names_what_it_stands_for():
    text = svg_of(stack(24))
    assert "× 24" in text
    assert "runs as cluster 0123abcd #1" in text
    assert svg_of(GraphReport("m", 0, "inductor")) != ""  # an empty graph still has an output


def test_ops_are_named_short():
    names = ("aten.linear", "aten.add.Tensor", "dlinfer.rms_norm", "cond")
    assert [short_op(name) for name in names] == ["linear", "add", "rms_norm", "cond"]


def test_layout_keeps_boxes_apart_and_edges_downward():
    rng = random.Random(0)
    for count in (1, 2, 7, 40):
        sizes = {index: (rng.uniform(20, 200), rng.uniform(20, 90)) for index in range(count)}
        edges = [(a, b) for b in range(count) for a in rng.sample(range(b), min(b, 2))]
        made = layout(sizes, edges)
        boxes = []
        for vertex, (x, y) in made.centres.items():
            width, height = sizes[vertex]
            boxes.append((x - width / 2, y - height / 2, x + width / 2, y + height / 2))
            assert boxes[-1][0] >= -1e-6
            assert boxes[-1][2] <= made.width + 1e-6
            assert boxes[-1][3] <= made.height + 1e-6
        assert len(boxes) == count
        for index, one in enumerate(boxes):
            for other in boxes[:index]:
                assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert set(made.routes) == set(edges)
        for route in made.routes.values():
            heights = [y for _, y in route]
            assert heights == sorted(heights)
        assert layout(sizes, edges) == made  # the same each time


def test_layout_keeps_ports_at_the_rims():
    made = layout(
        dict.fromkeys("iabo", (10.0, 10.0)), [("i", "a"), ("a", "b"), ("a", "o")], first=["i"], last=["o"]
    )
    heights = {vertex: y for vertex, (_, y) in made.centres.items()}
    assert heights["i"] == min(heights.values())
    assert heights["o"] == max(heights.values())
    assert layout({}, []).centres == {}
