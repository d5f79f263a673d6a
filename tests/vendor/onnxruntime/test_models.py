"""Models with caches that are written in place, by torch.compile on the engine: all of them in it, results eager's.

``tests/vendor/test_models_on_engines.py`` has models without a cache on every engine, and as artifacts.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers' own classes")

from dlinfer.graph.ir.flops import share
from dlinfer.graph.report import report
from tests.graph.matrix.calls import PLANS
from tests.graph.matrix.models import ARCHITECTURES, Architecture, build

pytestmark = [pytest.mark.usefixtures("graph_mode"), pytest.mark.slow]

OPTIONS: dict[str, Any] = {"engine": "onnxruntime", "fallback": "error"}
SHARE = 0.95
"""What the conditions ask for of the products' operations of Llama, Qwen2 and ViT."""

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
"""float32 sums in another order over two layers; results are of magnitude one."""


def architecture(name: str) -> Architecture:
    return next(one for one in ARCHITECTURES if one.name == name)


def in_engine(graph: report.GraphReport) -> float:
    """The engine's share of a graph's products, of which there must be some."""
    assert graph.engine == "onnxruntime"
    inside, outside = graph.flops("engine"), graph.flops("eager")
    assert inside + outside > 0
    return share(inside, outside)


SIZES = ((2, 5), (3, 8), (2, 17), (1, 1))


@pytest.mark.full
@pytest.mark.parametrize("name", ["vit", "llama", "qwen2", "mixtral", "qwen2-moe"])
def test_compiled_by_torch(name):
    """Prefill, then decode steps over a static cache that is written in place; images of several sizes for ViT."""
    one = architecture(name)
    model = build(one)
    fast = torch.compile(model, backend="dlinfer", dynamic=True, options=OPTIONS)
    for size in SIZES:
        results = []
        for forward in (model, fast):
            rng = torch.Generator().manual_seed(0)
            with torch.no_grad():
                plan = PLANS[one.inputs](one, model, lambda phase, f=forward, **given: f(**given), size, rng)
                results.append([(what, value.clone()) for what, value in plan])
        for (what, expected), (_, given) in zip(*results, strict=True):
            torch.testing.assert_close(given, expected, **CLOSE, msg=lambda text, w=what: f"{w}: {text}")
    graphs = report.reports()
    for graph in graphs:
        assert in_engine(graph) >= SHARE
        assert [(node.op, node.reason) for node in graph.placed("eager")] == []
        assert len(graph.regions) == 1
        assert graph.regions[0].notes == []  # no cache was copied, no call was left to torch
    # Dynamo compiles a size of 1 (a decode step, a batch) apart, and sizes that were equal at first and differ later.
    assert len([graph for graph in graphs if not graph.variant]) <= one.most_compilations


class Layer(torch.nn.Module):
    """A layer of attention over a cache that it writes in place."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(16)
        self.project, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.register_buffer("keys", torch.zeros(1, 2, 32, 8))
        self.register_buffer("values", torch.zeros(1, 2, 32, 8))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).view(1, -1, 6, 8).transpose(1, 2).chunk(3, 1)
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        seen = torch.arange(32) <= at[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        return x + self.out(mixed.transpose(1, 2).reshape(1, -1, 16))


def test_a_layer_with_a_cache():
    """The quick one of them: prompts and steps, one compilation and one for a single token."""
    layer, other = Layer(), Layer()
    other.load_state_dict(layer.state_dict())
    keys = layer.keys.data_ptr()
    fast = torch.compile(layer, backend="dlinfer", dynamic=True, options=OPTIONS)
    for first, count in ((0, 5), (5, 3), (8, 1), (9, 1), (0, 7)):
        x, at = torch.randn(1, count, 16), torch.arange(first, first + count)
        with torch.no_grad():
            torch.testing.assert_close(fast(x, at), other(x, at), **CLOSE)
        torch.testing.assert_close(layer.keys, other.keys, **CLOSE)
    assert layer.keys.data_ptr() == keys
    assert len(report.reports()) == 2
    for graph in report.reports():
        assert in_engine(graph) >= SHARE
        assert [region.notes for region in graph.regions] == [[]]
