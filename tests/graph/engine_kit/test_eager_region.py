"""A region that an engine gives back: right results, a reason for each node, the policy applied."""

import warnings

import pytest
import torch

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.engine_kit.eager_region import eager_region
from dlinfer.ops.core import fallback
from dlinfer.ops.core.fallback import FallbackWarning
from tests.graph.compiling import StubEngine, compiled, last_report, same_as_eager, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")
x = torch.randn(4, 6)
CONSTANT = torch.tensor([2.0])


class GivesBack(StubEngine):
    """Takes every node and compiles none. ``node``: the name of the node that is the reason."""

    def __init__(self, reason="its compiler failed", node=""):
        super().__init__()
        self.reason, self.node = reason, node

    def compile(self, region, options):
        return eager_region(region, self.name, options, self.reason, self.node)


def function(x):
    wide = x.view(-1, x.shape[0] * 2)
    x.add_(1)
    return wide.sin() * CONSTANT, x.cos()


def test_it_runs_as_eager_with_views_sizes_writes_and_constants(monkeypatch):
    use_engine(monkeypatch, GivesBack())
    same_as_eager(function, x)
    same_as_eager(function, x, calls=1)


def test_each_node_that_computes_is_refused_with_its_reason(monkeypatch):
    use_engine(monkeypatch, GivesBack("no sine", "sin"))
    with torch.no_grad():
        compiled(function)(x.clone())
    report = last_report()
    assert {node.op: node.reason for node in report.placed("eager")} == {
        "aten.add_.Tensor": "sin: no sine",
        "aten.sin": "no sine",
        "aten.mul.Tensor": "sin: no sine",
        "aten.cos": "sin: no sine",
    }
    assert report.placed("engine") == []
    assert sum(fallback.counts().values()) == 4


def test_policy_error_names_the_node_with_a_reason_of_its_own(monkeypatch):
    use_engine(monkeypatch, GivesBack("no cosine", "cos"))
    with torch.no_grad(), pytest.raises(GraphFallbackError, match=r"aten\.cos.*no cosine"):
        compiled(function, fallback="error")(x.clone())


def test_policy_warn_says_it(monkeypatch):
    use_engine(monkeypatch, GivesBack())
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        compiled(lambda x: x.sin(), fallback="warn")(x)
    (told,) = [str(one.message) for one in caught if one.category is FallbackWarning]
    assert "aten.sin runs outside graph engine 'stub': its compiler failed" in told
