"""What goes wrong shows in an explanation: recompiles, refusals, graph breaks; wrong calls of ``dlinfer.explain``."""

import itertools
import re
from collections import deque

import pytest
import torch

import dlinfer
from dlinfer import settings
from dlinfer.errors import CaptureError, CompileOptionError
from dlinfer.explanation.explanation import Explanation
from dlinfer.graph.engine import find_engine
from dlinfer.graph.report import report
from tests.caches import fresh_cache
from tests.graph.report.test_report import whole
from tests.torch_releases import since_2_13


def test_nothing_captured_shows():
    explanation = Explanation("m")
    assert explanation.coverage == 0.0
    assert "no graph was captured" in str(explanation)
    assert "No graph was captured" in explanation.to_html()


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, y)


@pytest.mark.full
def test_a_recompile_shows_its_cause(tmp_path):
    with settings.override(cache_dir=str(fresh_cache(tmp_path))):
        explanation = dlinfer.explain(product, torch.ones(2, 3), torch.ones(3, 4), dynamic=True)
        explanation.run(torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64))
        explanation.run(torch.ones(1, 3), torch.ones(3, 4))
        explanation.run(torch.ones(5, 6), torch.ones(6, 7))
    first, again, unit = explanation.graphs
    assert (first.cause, explanation.recompiles, explanation.size_1_variants) == (
        "first call",
        [again],
        [unit],
    )
    assert "dtype mismatch. expected Float, actual Double" in again.cause
    assert unit.variant == ("l_x_[0]",)
    assert re.search(r"^recompile: graph 1, .*dtype mismatch", str(explanation), re.M)
    assert re.search(r"^size-1 variant: graph 2, ", str(explanation), re.M)
    page = explanation.to_html()
    assert "<b>Recompile</b>" in page
    assert "<b>Size-1 variant</b>" in page


def test_graphs_are_found_also_when_the_oldest_reports_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_reports", deque([whole(), whole()], maxlen=2))
    monkeypatch.setattr(report, "_numbers", itertools.count(7))
    with settings.override(cache_dir=str(fresh_cache(tmp_path))):
        explanation = dlinfer.explain(product, torch.ones(2, 3), torch.ones(3, 4), dynamic=True)
        explanation.run(torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64))
        explanation.run(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64))
    assert [graph.index for graph in explanation.graphs] == [7, 8, 9]


def test_guards_name_the_line_that_asked(tmp_path):
    def clipped(x, y):
        return torch.mm(x, y) if x.shape[0] > 3 else torch.mm(x, y[:, :2])

    with settings.override(cache_dir=str(fresh_cache(tmp_path))):
        (graph,) = dlinfer.explain(clipped, torch.ones(5, 4), torch.ones(4, 4), dynamic=True).graphs
    assert any("> 3" in guard and "x.shape[0] > 3" in guard for guard in graph.guards)
    assert "4 and more, x.size()[0]" in graph.symbols.values()


def test_a_refusal_shows(tmp_path, monkeypatch):
    engine = find_engine(None, "cpu")
    reason = "a test says so"
    taken = type(engine).refuses
    monkeypatch.setattr(
        type(engine), "refuses", lambda self, n: reason if "mm" in str(n.target) else taken(self, n)
    )
    with settings.override(cache_dir=str(fresh_cache(tmp_path)), fallback="allow"):
        explanation = dlinfer.explain(product, torch.ones(2, 3), torch.ones(3, 4), dynamic=False)
    assert explanation.coverage == 0.0
    assert f"graph 0, not in the engine: aten.mm, 1 nodes: {reason}" in str(explanation)
    assert "mm  aten.mm float32[2, 4]: eager: a test says so" in explanation.to_text()
    assert f"<b>Not in the engine</b>: aten.mm, 1 ×: {reason}" in explanation.to_html()


def test_a_graph_that_cannot_be_captured_shows(tmp_path, monkeypatch):
    def refuse(*_, **options):
        raise CaptureError(reason="a test says so", line="model.py:3")

    monkeypatch.setattr("dlinfer.graph.backend.capture", refuse)
    with settings.override(cache_dir=str(fresh_cache(tmp_path)), fallback="allow"):
        explanation = dlinfer.explain(product, torch.ones(2, 3), torch.ones(3, 4))
    assert explanation.coverage == 0.0
    (graph,) = explanation.graphs
    assert "a test says so" in graph.refused
    assert "graph 0 runs without dlinfer" in str(explanation)
    assert "<b>Runs without dlinfer</b>" in explanation.to_html()


def test_graph_breaks_show_reason_and_line(tmp_path):
    def broken(x):
        x = torch.mm(x, x)
        print("in between")
        return torch.mm(x, x)

    with settings.override(cache_dir=str(fresh_cache(tmp_path))):
        explanation = dlinfer.explain(broken, torch.eye(3))
    (found,) = explanation.graph_breaks
    assert "builtin" in found.reason
    assert re.search(r"test_trouble.py:\d+, in broken", found.line)
    assert "Hint:" in found.advice
    assert len(explanation.graphs) == 2
    assert f"graph break: {found.reason}" in str(explanation)


@since_2_13("names the guard of the entry before, for a call that is not a recompilation")
def test_explaining_leaves_dynamos_other_entries_alone(tmp_path):
    ran = []

    def backend(graph_module, example_inputs):
        ran.append(graph_module)
        return graph_module.forward

    def square(x):
        return torch.mm(x, x)

    with settings.override(cache_dir=str(fresh_cache(tmp_path))):
        compiled = torch.compile(square, backend=backend)
        compiled(torch.eye(3))
        for _ in range(2):
            explanation = dlinfer.explain(square, torch.eye(3))
            assert [graph.cause for graph in explanation.graphs] == ["first call"]
        compiled(torch.eye(3))
    assert len(ran) == 1


def test_wrong_options_are_refused():
    with pytest.raises(CompileOptionError, match="one of the options engine"):
        dlinfer.explain(product, torch.eye(2), torch.eye(2), options={"enigne": "inductor"})


def test_what_the_model_raises_is_raised():
    with pytest.raises(Exception, match="same reduction dim"):
        dlinfer.explain(product, torch.ones(2, 3), torch.ones(2, 3))
