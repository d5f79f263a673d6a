"""In graph mode each phase of every family is one graph, and every node of it that computes is in the engine."""

import pytest

from examples.tiny_models.families import FAMILIES
from tests.e2e.harness import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

STRICT = {"DLINFER_FALLBACK": "error", "DLINFER_SMALL_REGIONS": "engine"}
REQUEST = {"name": "batch", "kind": "call", "gen": {"max_new_tokens": 6, "ignore_eos": True}}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_that_computes_is_in_the_engine(family: str, lab: Lab) -> None:
    """Under the strictest policy: nothing falls back, nothing is left out as too small."""
    model = lab.model(family)
    run = lab.engine(model, [REQUEST | {"prompts": lab.prompts(model)}], environment=STRICT)
    run.tokens("batch")
    graphs = run["explained"]
    assert sorted(graph["phase"] for graph in graphs) == ["decoding", "logits", "prefill"]
    for graph in graphs:
        assert graph["regions"] == 1, graph
        assert graph["eager"] == [], graph
        assert graph["coverage"] == 1.0, graph
