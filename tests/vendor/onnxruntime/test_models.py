"""Tiny models of transformers through torch.compile: every node in the engine, one graph for all sizes, eager's logits.

S4-09, S4-10. The conditions ask for 95 % of the FLOPs of Llama, Qwen2 and ViT in the engine; all nodes are there.
"""

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers' own classes")

from dlinfer.graph import report
from tests.graph.matrix.calls import PLANS
from tests.graph.matrix.models import ARCHITECTURES, build

pytestmark = [pytest.mark.usefixtures("graph_mode"), pytest.mark.slow]

SIZES = ((2, 5), (3, 8), (1, 17), (2, 8))
OPTIONS = {"engine": "onnxruntime", "fallback": "error", "small_regions": "engine"}


@pytest.mark.parametrize("name", ["llama", "qwen2", "vit", "mixtral", "qwen2-moe"])
def test_a_model_runs_in_the_engine_alone(name):
    """Prefill, then decode steps over a static cache that is written in place; images of several sizes for ViT."""
    architecture = next(one for one in ARCHITECTURES if one.name == name)
    model = build(architecture)
    fast = torch.compile(model, backend="dlinfer", options=OPTIONS)
    for size in SIZES:
        results = []
        for forward in (model, fast):
            rng = torch.Generator().manual_seed(0)
            with torch.no_grad():
                plan = PLANS[architecture.inputs](architecture, model, lambda phase, f=forward, **k: f(**k), size, rng)
                results.append([(what, value.clone()) for what, value in plan])
        for (what, expected), (_, given) in zip(*results, strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4, msg=lambda text, w=what: f"{w}: {text}")
    for graph in report.reports():
        assert graph.engine == "onnxruntime"
        assert [(node.op, node.reason) for node in graph.nodes if node.place == "eager"] == []
        assert len(graph.regions) == 1


def test_a_graph_of_many_sizes_is_compiled_once():
    """One artifact for all batch sizes and lengths, but where a size is 1."""
    architecture = next(one for one in ARCHITECTURES if one.name == "llama")
    model = build(architecture)
    fast = torch.compile(model, backend="dlinfer", dynamic=True, options=OPTIONS)
    for batch, length in ((2, 5), (3, 8), (4, 6), (2, 17)):
        ids = torch.randint(3, 100, (batch, length))
        with torch.no_grad():
            given, expected = fast(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    assert len(report.reports()) == 1
