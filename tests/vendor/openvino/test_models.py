"""transformers' models through torch.compile on the engine: prefill and decode over a static cache, images.

Nothing runs outside the engine, results are eager's, one compilation serves all batch sizes and lengths (but those of
1, which Dynamo compiles apart).
"""

from typing import Any

import pytest
import torch

from dlinfer.graph.report import report
from examples.tiny_models.build import build as build_family
from tests.graph.matrix.models import ARCHITECTURES, CACHE_LENGTH, build

pytestmark = [pytest.mark.usefixtures("graph_mode"), pytest.mark.slow, pytest.mark.full]

OPTIONS: dict[str, Any] = {"engine": "openvino", "fallback": "error", "small_regions": "engine"}


def model_of(name):
    return build(next(one for one in ARCHITECTURES if one.name == name))


def compiled(model):
    return torch.compile(model, backend="dlinfer", dynamic=True, options=OPTIONS)


def generated(model, forward, sizes, steps):
    """Logits of prefill and of greedy steps behind it, for each (batch, length); and the caches."""
    from transformers import StaticCache

    rng = torch.Generator().manual_seed(0)
    logits, caches = [], []
    for batch, length in sizes:
        cache = StaticCache(model.config, max_cache_len=CACHE_LENGTH)
        ids = torch.randint(3, 101, (batch, length), generator=rng)
        for _ in range(1 + steps):
            out = forward(input_ids=ids, past_key_values=cache, use_cache=True).logits
            logits.append(out.clone())
            ids = out[:, -1].argmax(-1, keepdim=True)
        caches.append(cache)
    return logits, caches


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_decoders(name):
    model = model_of(name)
    sizes = [(2, 5), (3, 8), (2, 17)]
    with torch.no_grad():
        expected, theirs = generated(model, model, sizes, 2)
        got, ours = generated(model, compiled(model), sizes, 2)
    for one, other in zip(got, expected, strict=True):
        # float32 sums in another order, over two layers; logits are of magnitude one.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours, theirs, strict=True):
        for mine, eager in zip(one.layers, other.layers, strict=True):
            torch.testing.assert_close(mine.keys, eager.keys, rtol=1e-4, atol=1e-4)
    graphs = report.reports()
    assert sum(graph.flops("eager") for graph in graphs) == 0
    assert not [node for graph in graphs for node in graph.placed("eager")]
    assert not [note for graph in graphs for region in graph.regions for note in region.notes]


def test_images():
    model = model_of("vit")
    run = compiled(model)
    with torch.no_grad():
        for batch in (2, 3, 5):
            pixels = torch.randn(batch, 3, 32, 32)
            torch.testing.assert_close(
                run(pixel_values=pixels).last_hidden_state,
                model(pixel_values=pixels).last_hidden_state,
                rtol=1e-4,
                atol=1e-4,
            )
    assert len(report.reports()) == 1


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_mask_of_an_indexer(family, dynamic, tmp_path):
    """It is made of aranges, inverted through a view for the indexer, and read again."""
    from transformers import AutoModelForCausalLM

    build_family(family, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.randint(3, 101, (2, 17))
    run = torch.compile(model, backend="dlinfer", dynamic=dynamic, options=OPTIONS | {"fallback": "allow"})
    with torch.no_grad():
        for _ in range(2):
            got, expected = (one(input_ids=ids, use_cache=False).logits for one in (run, model))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
