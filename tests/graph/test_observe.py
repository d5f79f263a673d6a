"""What compilations tell never stops them."""

import json

import pytest
import torch

from dlinfer.graph import observe
from dlinfer.graph.ir.global_state import GlobalState, Requirement
from dlinfer.graph.ir.program import Program
from dlinfer.graph.lowering.compiled import CompiledGraph
from tests.graph.compiling import StubEngine, compiled, last_report, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.mark.parametrize(
    "broken",
    [
        "dlinfer.graph.observe._function_of",
        "dlinfer.graph.observe.held_bytes",
        "dlinfer.graph.report.debug.text_of",
        "dlinfer.graph.lowering.lower.flops_of",
    ],
)
def test_a_report_that_fails_is_warned_of_and_the_graph_runs(broken, monkeypatch):
    def fails(*args):
        raise RuntimeError("Cannot access data pointer")

    use_engine(monkeypatch, StubEngine())
    monkeypatch.setattr(broken, fails)
    x = torch.randn(3)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="report of a graph is incomplete.*data pointer"):
        torch.testing.assert_close(compiled(lambda x: x * 2 + 1)(x), x * 2 + 1)
    assert not last_report().refused


def test_held_memory_is_counted_once_and_needs_no_pointer():
    held = torch.empty(8, device="meta")
    constants = {"whole": held, "part": held[:2], "other": torch.ones(4)}
    program = Program("graph", [], [], (), lambda reference: print, constants)
    requirement = Requirement(GlobalState.now(), reads_default_dtype=False)
    assert observe.held_bytes(CompiledGraph(StubEngine(), program, requirement)) == 8 * 4 + 4 * 4


def test_tlparse_shows_the_stages(monkeypatch):
    logged = {}

    def log(kind, metadata, *, payload_fn):
        logged[metadata()["name"]] = payload_fn()

    monkeypatch.setattr("dlinfer.graph.torch_private.structured_log.trace_structured", log)
    use_engine(monkeypatch, StubEngine())
    with torch.no_grad():
        compiled(lambda x: x * 2 + 1)(torch.randn(3))
    report = last_report()
    assert logged == {
        "dlinfer_captured": report.captured,
        "dlinfer_after_passes": report.lowered,
        "dlinfer_report": json.dumps(report.to_dict(), indent=1),
    }
