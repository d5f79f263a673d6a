"""C++ kernels and compiled loops answer first; what is wrong runs by torch, with its reason."""

from dataclasses import replace

import pytest
import torch

from dlinfer.graph import engine as engines
from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.graph.selftest import suite
from dlinfer.ops.core import fallback
from dlinfer.vendor.cpu.inductor import selftest
from dlinfer.vendor.cpu.inductor.engine import InductorEngine
from tests.graph.conftest import artifact_folder, graph_mode
from tests.vendor.cpu.test_native import needs_compiler

__all__ = ["artifact_folder", "graph_mode"]


@pytest.fixture
def fresh(monkeypatch, tmp_path, graph_mode):
    """An engine that has not been asked anything, with a folder of its own for what it is asked."""
    engine = InductorEngine()
    monkeypatch.setitem(engines._engines, ("cpu", "inductor"), engine)
    monkeypatch.setattr(suite, "_cache", lambda: ArtifactCache(tmp_path, "selftest"))
    return engine


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 48)

    def forward(self, x):
        return torch.relu(self.linear(x) * 2).sigmoid() > 0.5


def _off(value):
    return ~value if value.dtype == torch.bool else value + 1


@needs_compiler
def test_all_answers_are_right_here(fresh):
    assert [one for one in fresh.selftest.results() if one.state == "failed"] == []


@needs_compiler
@pytest.mark.parametrize(
    ("part", "kinds"), [("C++ linear", {"aten.linear"}), ("compiled loops", {"aten.relu"})]
)
def test_what_is_wrong_is_torch_s(monkeypatch, fresh, part, kinds):
    """A planted fault: results off by one."""
    planted = [
        replace(one, run=lambda run=one.run: [_off(value) for value in run()])
        if one.name.startswith(part)
        else one
        for one in selftest.cases()
    ]
    monkeypatch.setattr(fresh.selftest, "cases", lambda: planted)
    model, x = Model().requires_grad_(False), torch.randn(3, 32)
    compiled = torch.compile(model, backend="dlinfer", options={"engine": "inductor"})
    torch.testing.assert_close(compiled(x), model(x))
    reasons = {kind.op: kind.reason for kind in fallback.counts() if kind.vendor == "inductor"}
    assert kinds <= set(reasons)
    assert all("on this CPU gets" in reason and part in reason for reason in reasons.values())


@needs_compiler
def test_it_is_asked_while_dynamo_compiles(fresh, tmp_path):
    """Dynamo holds its lock and a fake mode meanwhile."""
    model, x = Model().requires_grad_(False), torch.randn(3, 32)
    compiled = torch.compile(model, backend="dlinfer", options={"engine": "inductor", "fallback": "error"})
    torch.testing.assert_close(compiled(x), model(x))
    assert list((tmp_path / "selftest").iterdir())
