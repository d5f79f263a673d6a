"""Reports of compilations: what they count, and that they survive JSON."""

import itertools
import json

import pytest

from dlinfer.graph.passes.pipeline import PassReport
from dlinfer.graph.passes.rewriter import Edit, RefusedMatch
from dlinfer.graph.report import report
from dlinfer.graph.report.report import (
    ClusterReport,
    GraphReport,
    InputReport,
    NodeReport,
    RegionReport,
)


def node(
    name: str, place: str = "engine", how: str = "", reason: str = "", op: str = "aten.mm"
) -> NodeReport:
    return NodeReport(name, op, place, how, reason, "model.py:3, in forward", "float32[2, 2]", ("x",))


def whole() -> GraphReport:
    edit = Edit("rms_norm", ("mul", "rsqrt"), ("rms_norm",), "model.py:3, in forward")
    return GraphReport(
        model="forward (model.py:1)",
        index=0,
        engine="inductor",
        variant=("x[0]",),
        passes=[
            PassReport("remove_noops", "why", [Edit("drop aten.to", ("to",), (), "")], 0.1, 9),
            PassReport("rms_norm", "why", [edit, edit], 0.1, 7),
            PassReport("rotary", "why", refused=[RefusedMatch("mul_3", "why not", "model.py:4, in forward")]),
        ],
        inputs=[InputReport("x", "float32[2, 2]", False)],
        nodes=[
            node("mm", how="kernel op aten.mm"),
            node("mm_1", how="kernel op aten.mm"),
            node("silu", how="cluster 0123abcd #1"),
            node("cond", "eager", reason="it is a higher-order op", op="cond"),
            node("view", "view"),
        ],
        outputs=("mm_1",),
        regions=[RegionReport("region_0", "inductor", 3, [ClusterReport("0123abcd", 4, 2, 0.5, "disk")])],
        symbols={"s0": "2 and more, x.size()[0]"},
        seconds={"capture": 0.5},
        memory={"weights": 64},
    )


def test_a_report_survives_json():
    assert GraphReport.from_dict(json.loads(json.dumps(whole().to_dict()))) == whole()


def test_what_a_report_counts():
    graph = whole()
    assert graph.rules() == {"rms_norm": 2}  # neither cleaning passes nor rules that never fired
    assert graph.kernels() == {"op aten.mm": 2}
    assert {key: [n.name for n in nodes] for key, nodes in graph.refusals().items()} == {
        ("cond", "it is a higher-order op"): ["cond"]
    }
    assert [n.where for n in graph.nodes[1:]] == [
        "kernel op aten.mm",
        "cluster 0123abcd #1",
        "eager: it is a higher-order op",
        "view",
    ]


@pytest.mark.parametrize(
    ("model", "sizes", "counts"),
    [
        ("forward (model.py:3)", ("s0", "4"), True),
        ("forward (model.py:3)", ("2", "4"), True),
        ("forward (model.py:9)", ("2", "4"), True),  # the line is that of the graph's first call
        (
            "forward (model.py:3)",
            ("1", "4"),
            False,
        ),  # it was 1 before: it is compiled again for something else
        ("other (model.py:3)", ("s0", "4"), False),
    ],
)
def test_a_size_1_variant_has_a_1_where_another_graph_has_not(model, sizes, counts):
    earlier = GraphReport(model, 0, "inductor", inputs=[InputReport("x", "", False, sizes)])
    graph = GraphReport("forward (model.py:3)", 1, "inductor", variant=("x[0]",))
    assert graph.is_size_1_variant([earlier]) is counts
    assert not graph.is_size_1_variant([])


def test_reports_are_numbered_and_kept_in_order(monkeypatch):
    monkeypatch.setattr(report, "_reports", [])
    monkeypatch.setattr(report, "_numbers", itertools.count())
    made = [report.record(GraphReport(name, -1, "inductor")) for name in "ab"]
    assert [graph.index for graph in made] == [0, 1]
    assert report.reports() == made
    report.reset()
    assert report.reports() == []
