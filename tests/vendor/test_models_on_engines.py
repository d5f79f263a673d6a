"""Four models of transformers on every graph engine: through torch.compile, and as artifacts in another process.

Weights are random, sizes reduced. What an engine has to take of a model stands in ``ENGINES``.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import dlinfer
from dlinfer.graph.ir.flops import share
from dlinfer.graph.report import report
from dlinfer.graph.report.report import GraphReport
from dlinfer.vendor import discovery
from tests.graph.conftest import artifact_folder, graph_mode
from tests.graph.matrix.models import ARCHITECTURES, VOCAB, build
from tests.torch_releases import IS_2_12

__all__ = ["artifact_folder", "graph_mode"]

pytestmark = [pytest.mark.usefixtures("graph_mode"), pytest.mark.slow, pytest.mark.timeout(2000)]


@dataclass(frozen=True)
class Wanted:
    """fallback: the policy. nodes, flops: the least share of compute nodes and of FLOPs in the engine."""

    fallback: str
    nodes: float
    flops: float


ENGINES = {
    "inductor": Wanted("error", 0.99, 0.99),
    "onnxruntime": Wanted("error", 0.99, 0.99),
    "openvino": Wanted("error", 0.99, 0.99),
}

TOLERANCE = 1e-4
"""Relative and absolute: float32 sums in another order, over two layers; results are of magnitude one."""


class Decoder(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class Encoder(nn.Module):
    """Images [batch, 3, 32, 32] -> hidden states [batch, patches + 1, hidden size]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).last_hidden_state


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(batch))


def _pixels(batch: int, length: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))


@dataclass(frozen=True)
class Case:
    """A model, the name of its one input, what makes it for a batch and a length, and which sizes change."""

    module: type[nn.Module]
    name: str
    made: Callable[[int, int], Tensor]
    sizes: dict[int, Any]

    def model(self, architecture: str) -> nn.Module:
        return self.module(build(next(one for one in ARCHITECTURES if one.name == architecture))).eval()


BATCH, LENGTH = Dim("batch", min=1, max=64), Dim("length", min=1, max=64)
TEXT = Case(Decoder, "input_ids", _ids, {0: BATCH, 1: LENGTH})
CASES = {
    "llama": TEXT,
    "qwen2": TEXT,
    "mixtral": TEXT,
    "vit": Case(Encoder, "pixel_values", _pixels, {0: BATCH}),
}
SIZES = [(4, 8), (2, 17), (5, 3)]
"""The first batch is no other size of the models: Dynamo would take the two for one."""

SMALL = [(1, 1), (1, 9), (4, 1)]


def every_cell(quick: str) -> Any:
    """A decoder on the engine ``quick`` is in the gate; the model matrix has inductor there."""
    return pytest.mark.parametrize(("engine", "architecture"), list(_cells(quick)))


def _cells(quick: str) -> Iterator[Any]:
    for engine in ENGINES:
        for architecture in CASES:
            marks = () if (engine, architecture) == (quick, "llama") else pytest.mark.full
            yield pytest.param(engine, architecture, id=f"{engine}-{architecture}", marks=marks)


def needs(engine: str) -> None:
    """Skip where the engine's vendor says why it is not available."""
    vendors = [discovery.get(name) for name in discovery.names()]
    (vendor,) = (one for one in vendors if engine in one.engines)
    if not (found := discovery.probe(vendor)).available:
        pytest.skip(found.reason)


def options(engine: str) -> dict[str, Any]:
    return {"engine": engine, "fallback": ENGINES[engine].fallback, "small_regions": "engine"}


def covers(graph: GraphReport, wanted: Wanted) -> None:
    inside, outside = (len(graph.placed(place)) for place in ("engine", "eager"))
    assert inside
    assert share(inside, outside) >= wanted.nodes
    assert share(graph.flops("engine"), graph.flops("eager")) >= wanted.flops
    assert graph.flops("engine") > 0


@every_cell(quick="onnxruntime")
def test_through_torch_compile(engine, architecture):
    """One compilation serves all sizes (but those of 1, which Dynamo compiles apart)."""
    needs(engine)
    case = CASES[architecture]
    model = case.model(architecture)
    compiled = torch.compile(model, backend="dlinfer", dynamic=True, options=options(engine))
    with torch.no_grad():
        for size in SIZES:
            given = case.made(*size)
            torch.testing.assert_close(compiled(given), model(given), rtol=TOLERANCE, atol=TOLERANCE)
    (graph,) = report.reports()
    covers(graph, ENGINES[engine])


@pytest.mark.e2e
@every_cell(quick="openvino")
def test_as_an_artifact_in_another_process(engine, architecture, tmp_path):
    """One artifact serves all sizes, those of 1 too; the process that loads it has no model."""
    if IS_2_12 and architecture == "llama":
        pytest.skip("torch 2.12 guards on the length where keys are repeated for several heads")
    needs(engine)
    case = CASES[architecture]
    model = case.model(architecture)
    shapes = {case.name: case.sizes}
    artifact = dlinfer.compile(model, (case.made(2, 5),), dynamic_shapes=shapes, options=options(engine))
    covers(artifact.report, ENGINES[engine])
    artifact.save(tmp_path / "model.dlinfer")
    given = [case.made(*size) for size in (*SIZES, *SMALL)]
    arrays: dict[str, Any] = {str(call): one.numpy() for call, one in enumerate(given)}
    np.savez(tmp_path / "inputs.npz", **arrays)
    job = [sys.executable, "-m", "tests.vendor.session_job", str(tmp_path), case.name]
    done = subprocess.run(job, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = np.load(tmp_path / "results.npz")
    with torch.no_grad():
        for call, one in enumerate(given):
            ours = torch.from_numpy(found[str(call)])
            torch.testing.assert_close(ours, model(one), rtol=TOLERANCE, atol=TOLERANCE)
