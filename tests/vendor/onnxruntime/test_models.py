"""Tiny models of transformers on the engine: by torch.compile, and as a file that another process loads (U1, U4).

S4-09, S4-10. Llama-, Qwen2-, mixture-of-experts and ViT models with random weights, in float32: every product runs in
the engine, one graph serves all batch sizes and lengths, results are eager's.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers' own classes")

import dlinfer
from dlinfer.graph import report
from dlinfer.graph.flops import share
from tests.graph.matrix.calls import PLANS
from tests.graph.matrix.models import ARCHITECTURES, VOCAB, Architecture, build

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


# --- torch.compile

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


# --- ahead of time, and in another process


class Logits(torch.nn.Module):
    """A language model without a cache, for any batch and length."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


class Features(torch.nn.Module):
    """An image model, for any number of images."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixels).last_hidden_state


def module_and_inputs(name: str) -> tuple[torch.nn.Module, dict[str, Any], list[torch.Tensor]]:
    """(the module, its dynamic shapes, inputs of several sizes)."""
    batch, length = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("length", min=1, max=32)
    one = architecture(name)
    if one.inputs == "vision":
        images = [torch.randn(count, 3, 32, 32) for count in (2, 1, 8)]
        return Features(build(one)), {"pixels": {0: batch}}, images
    prompts = [torch.randint(3, VOCAB, size) for size in ((2, 5), (1, 1), (8, 3), (1, 32))]
    return Logits(build(one)), {"ids": {0: batch, 1: length}}, prompts


IN_ANOTHER_PROCESS = """
import sys
import torch
import dlinfer
from dlinfer.graph import report

file, inputs, outputs = sys.argv[1:]
session = dlinfer.load(file)
(port,) = session.model_input_shape_dict()
results = [session.run({port: value})["output"] for value in torch.load(inputs, weights_only=True)]
torch.save(results, outputs)
(graph,) = report.reports()
assert "transformers" not in sys.modules
print(graph.engine, len(graph.placed("eager")), len(graph.regions))
"""


FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("llama", "qwen2", "mixtral")]


@pytest.mark.parametrize("name", ["vit", *FULL])
def test_saved_and_run_in_another_process(name, tmp_path):
    module, shapes, inputs = module_and_inputs(name)
    artifact = dlinfer.compile(module, (inputs[0],), dynamic_shapes=shapes, options=OPTIONS)
    assert artifact.report.placed("eager") == []
    assert len(artifact.report.placed("engine")) > 20
    with torch.no_grad():
        expected = [module(value) for value in inputs]
    for value, want in zip(inputs, expected, strict=True):
        torch.testing.assert_close(artifact(value), want, **CLOSE)
    file = tmp_path / f"{name}.dlinfer"
    artifact.save(file)
    torch.save(inputs, tmp_path / "inputs.pt")
    assert run_elsewhere(file, tmp_path) == "onnxruntime 0 1"
    given = torch.load(tmp_path / "outputs.pt", weights_only=True)
    for one, want in zip(given, expected, strict=True):
        torch.testing.assert_close(one, want, **CLOSE)


def run_elsewhere(file: Path, folder: Path) -> str:
    """What the other process says."""
    told = [sys.executable, "-c", IN_ANOTHER_PROCESS, file, folder / "inputs.pt", folder / "outputs.pt"]
    child = subprocess.run(told, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()
