"""The graph engine sophgo on the emulator: torch.compile and what it does where a chip cannot."""

import contextlib
import os
import signal
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dlinfer
from dlinfer import settings
from dlinfer.errors import CompileOptionError, EngineUnavailableError, GraphFallbackError
from dlinfer.graph.report import report
from dlinfer.ops.core import fallback
from dlinfer.vendor.sophgo.compiler import cache as compiler_cache
from dlinfer.vendor.sophgo.compiler import onnx_file
from dlinfer.vendor.sophgo.compiler import process as compiler_process
from dlinfer.vendor.sophgo.engine.engine import SophgoEngine
from dlinfer.vendor.sophgo.engine.options import SophgoOptions
from dlinfer.vendor.sophgo.errors import SophgoWorkerError
from tests.vendor.sophgo.regions import ENGINE, compiled, refused, relative, subgraph

HALF = 5e-3
"""Of products in float16 with sums in float32."""


class Mlp(nn.Module):
    """A gated MLP with its norm and residual."""

    def __init__(self, hidden: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Attention(nn.Module):
    """Grouped-query attention with a mask of floats."""

    def __init__(self, hidden: int = 64, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        self.query, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.key, self.value = (nn.Linear(hidden, hidden // heads * shared) for _ in range(2))

    def forward(self, x, mask):
        batch, length, hidden = x.shape
        q = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (one(x).view(batch, length, self.shared, -1).transpose(1, 2) for one in (self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class Vit(nn.Module):
    """Patches of an image, their positions, and one block as vision transformers have it."""

    def __init__(self, hidden: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, hidden, 8, stride=8)
        self.positions = nn.Parameter(torch.randn(1, 16, hidden) * 0.1)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.inner, self.outer = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.outer(F.gelu(self.inner(self.norm2(x))))


@pytest.fixture
def graph_mode(toolchain):
    """Nothing compiled before is seen, by Dynamo or in the reports; no fallback was counted."""
    torch._dynamo.reset()
    report.reset()
    fallback.reset()
    with settings.override(fallback="error"), torch.no_grad():
        yield
    torch._dynamo.reset()


def causal(length: int) -> torch.Tensor:
    return torch.full((length, length), -torch.inf).triu(1)


MODELS = {
    "mlp": (Mlp, lambda: (torch.randn(2, 8, 64),)),
    "attention": (Attention, lambda: (torch.randn(2, 8, 64), causal(8))),
    "vit": (Vit, lambda: (torch.randn(2, 3, 32, 32),)),
}


def run(name: str, dtype: torch.dtype, **options):
    """(what the engine gives, what torch gives in float32, the report)."""
    torch.manual_seed(1)
    made, inputs = MODELS[name]
    model = made().eval()
    given = [value.to(dtype) for value in inputs()]
    wanted = model.float()(*[value.float() for value in given])
    model = model.to(dtype)
    told: Any = {"engine": "sophgo", "engine_options": options}
    run = torch.compile(model, backend="dlinfer", dynamic=False, options=told)
    return run(*given), wanted, report.reports()[-1]


def shares(found: report.GraphReport) -> tuple[float, float]:
    """(share of the nodes that compute, share of the products' operations) in the engine."""
    nodes = [node for node in found.nodes if node.place in ("engine", "eager")]
    inside = [node for node in nodes if node.place == "engine"]
    return len(inside) / len(nodes), sum(n.flops for n in inside) / sum(n.flops for n in nodes)


@pytest.mark.parametrize(
    ("name", "dtype", "chip", "tolerance"),
    [
        ("mlp", torch.float32, "bm1684x", 1e-6),
        ("attention", torch.float32, "bm1688", 1e-6),
        ("vit", torch.float32, "bm1684x", 1e-6),
        ("attention", torch.float16, "bm1684x", HALF),
        pytest.param("mlp", torch.float16, "bm1688", HALF, marks=pytest.mark.full),
        pytest.param("vit", torch.float16, "bm1688", HALF, marks=pytest.mark.full),
        # 8 bits of mantissa in weights, inputs and every result
        ("mlp", torch.bfloat16, "bm1688", 3e-2),
        pytest.param("vit", torch.bfloat16, "bm1684x", 3e-2, marks=pytest.mark.full),
    ],
)
def test_blocks_run_wholly_in_the_engine(graph_mode, name, dtype, chip, tolerance):
    """Under fallback=error: every node that computes, so of the ViT block too."""
    result, wanted, found = run(name, dtype, chip=chip)
    assert result.dtype == dtype
    assert relative(result, wanted) < tolerance
    assert shares(found) == (1.0, 1.0)
    assert any(chip in note for region in found.regions for note in region.notes)


@pytest.mark.parametrize(
    ("quantize", "tolerance"), [("F16", HALF), ("W8F16", 2e-2), ("W4BF16", 2e-1), ("INT8", 1e-1)]
)
def test_a_float32_region_in_other_numbers(graph_mode, quantize, tolerance):
    """Tolerances by the bits of the weights: 8 give about 0.4 %, 4 about 7 %; INT8 has 8 bits everywhere."""
    result, wanted, _ = run("mlp", torch.float32, quantize=quantize)
    assert result.dtype == torch.float32
    assert 0 < relative(result, wanted) < tolerance


def product(x, w, b):
    return F.relu(F.linear(x, w, b)) * 2.0 - x


_SEEDED = torch.Generator().manual_seed(11)
WEIGHTS = (torch.randn(16, 16, generator=_SEEDED), torch.randn(16, generator=_SEEDED))
"""The same in every run, as their bmodels are then."""


def test_each_set_of_sizes_has_a_bmodel_and_is_counted(graph_mode):
    x = torch.randn(6, 16)
    region = compiled(product, x, *WEIGHTS, static=(1, 2), open_sizes=(6,), fallback="allow", max_shapes=2)
    for rows in (6, 3, 6):
        given = torch.randn(rows, 16)
        (result,) = region.run(given, *WEIGHTS)
        assert relative(result, product(given, *WEIGHTS)) < 1e-6
    assert sum("bmodel F32" in note for note in region.notes) == 2
    given = torch.randn(4, 16)
    (result,) = region.run(given, *WEIGHTS)
    assert torch.equal(result, product(given, *WEIGHTS))
    assert "max_shapes" in region.notes[-1]
    assert any("max_shapes" in kind.reason for kind in fallback.counts())


def test_large_weights_reach_the_compiler_in_a_file_of_their_own(graph_mode, monkeypatch):
    monkeypatch.setattr(onnx_file, "FILE_BYTES", 0)
    x = torch.randn(6, 16)
    region = compiled(product, x, *WEIGHTS, static=(1, 2))
    (result,) = region.run(x, *WEIGHTS)
    assert relative(result, product(x, *WEIGHTS)) < 1e-6


def test_a_changed_weight_is_compiled_in(graph_mode):
    x, weight = torch.randn(6, 16), WEIGHTS[0].clone()
    region = compiled(product, x, weight, WEIGHTS[1], static=(1, 2))
    region.run(x, weight, WEIGHTS[1])
    weight.mul_(2.0)
    (result,) = region.run(x, weight, WEIGHTS[1])
    assert relative(result, product(x, weight, WEIGHTS[1])) < 1e-6
    assert any("weights changed" in note for note in region.notes)


def test_what_a_region_writes_is_written(graph_mode):
    def model(x, cache):
        cache.mul_(0.5)
        cache.add_(F.softmax(x, -1))
        return (cache * x).sum(-1) + x.exp().mean(-1)

    x, cache = torch.randn(4, 16), torch.randn(4, 16)
    wanted_cache = cache.clone()
    wanted = model(x, wanted_cache)
    (result,) = compiled(model, x, cache).run(x, cache)
    assert relative(result, wanted) < 1e-5
    assert relative(cache, wanted_cache) < 1e-6


def looked_up(ids, table):
    return F.layer_norm(F.embedding(ids, table), (16,)).tanh() * 3.0


def test_a_row_that_does_not_exist_is_what_it_is_in_torch(graph_mode):
    """The chip would read whatever lies there."""
    ids, table = torch.tensor([[3, 0, 9]]), torch.randn(10, 16)
    region = compiled(looked_up, ids, table, static=(1,), fallback="allow")
    assert relative(region.run(ids, table)[0], looked_up(ids, table)) < 1e-5
    for wrong in (10, -1, 2**33):
        with pytest.raises((IndexError, RuntimeError)):
            region.run(torch.tensor([[3, 0, wrong]]), table)


@pytest.mark.parametrize("traced", [4, 9])
def test_rows_are_those_of_the_table_that_a_call_brings(graph_mode, traced):
    """The region was traced with a smaller table, and with a larger one."""

    def model(ids, table):
        return F.embedding(ids, table * 2.0) + table.tanh().sum(0) + 1.0

    ids = torch.tensor([[3, 0, 2]])
    region = compiled(model, ids, torch.randn(traced, 16), open_sizes=(traced,), fallback="allow")
    table, last = torch.randn(6, 16), torch.tensor([[3, 0, 5]])
    assert relative(region.run(last, table)[0], model(last, table)) < 1e-5
    assert not fallback.counts()
    with pytest.raises((IndexError, RuntimeError)):
        region.run(last, table[:5].clone())
    assert not fallback.counts()  # torch was to say what is wrong, not to compute


def test_under_error_a_call_that_torch_would_run_is_refused(graph_mode):
    region = compiled(product, torch.randn(0, 16), *WEIGHTS, static=(1, 2))
    with pytest.raises(GraphFallbackError, match="no elements"):
        region.run(torch.randn(0, 16), *WEIGHTS)


def test_what_the_compiler_refuses_runs_by_torch_and_is_counted(graph_mode, monkeypatch):
    monkeypatch.setattr(compiler_cache, "kept", lambda key: None)  # what another test compiled
    x = torch.randn(6, 16)
    region = compiled(product, x, *WEIGHTS, static=(1, 2), fallback="allow", timeout=0.01)
    (result,) = region.run(x, *WEIGHTS)
    assert torch.equal(result, product(x, *WEIGHTS))
    assert any("ended after 0.01 s" in note for note in region.notes)
    assert sum(fallback.counts().values()) == 1


def test_nodes_outside_are_refused_with_reasons_and_counted(graph_mode):
    def model(x):
        return F.softmax(x @ x.t(), -1).cumsum(-1) @ x

    x = torch.randn(8, 8)
    with settings.override(fallback="allow"):
        run = torch.compile(model, backend="dlinfer", options={"engine": "sophgo"})
        assert relative(run(x), model(x)) < 1e-5
    nodes = {node.op: node for node in report.reports()[-1].nodes}
    assert "CumSum" in nodes["aten.cumsum"].reason
    assert any("CumSum" in kind.reason for kind in fallback.counts())
    torch._dynamo.reset()
    with pytest.raises(GraphFallbackError, match="CumSum"):
        torch.compile(model, backend="dlinfer", options={"engine": "sophgo"})(x)


def test_after_a_worker_that_ended_the_next_run_works(fresh, graph_mode):
    x = torch.randn(6, 16)
    run: Any = compiled(product, x, *WEIGHTS, static=(1, 2)).run
    run(x, *WEIGHTS)
    (net,) = run._run._built.run._nets.values()
    worker = net._model._worker
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(SophgoWorkerError):
        run(x, *WEIGHTS)
    (result,) = run(x, *WEIGHTS)
    assert relative(result, product(x, *WEIGHTS)) < 1e-6


def test_two_halves_in_one_region_run_by_torch(graph_mode):
    def model(x, y):
        return (x @ x.t()).float() + (y @ y.t()).float()

    x, y = torch.randn(4, 4).half(), torch.randn(4, 4).bfloat16()
    region = subgraph(model, x, y)
    assert not refused(region)
    from dlinfer.graph.options import CompileOptions

    with pytest.raises(GraphFallbackError, match="float16 and bfloat16"):
        ENGINE.compile(region, CompileOptions(engine="sophgo"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"chips": "bm1684x"}, "max_shapes"),
        ({"chip": "bm1690"}, "no runtime"),
        ({"chip": "a"}, "bm1688"),
        ({"quantize": "F8"}, "W4F16"),
        ({"max_shapes": 0}, "of at least 1"),
        ({"device": -1}, "of at least 0"),
        ({"cores": 2, "chip": "bm1684x"}, "1 to 1"),
        ({"cores": 3}, "1 to 2"),
        ({"group_size": 5}, "multiple of 32"),
        ({"timeout": 0}, "seconds"),
    ],
)
def test_wrong_options_name_the_right_ones(options, named):
    with pytest.raises(CompileOptionError, match=named):
        SophgoOptions.of(options)


def test_an_artifact_runs_where_it_is_loaded(graph_mode, tmp_path):
    """It holds graph and weights; the bmodel comes from the cache."""
    torch.manual_seed(1)
    model, x = Mlp().eval(), torch.randn(2, 8, 64)
    dlinfer.compile(model, (x,), engine="sophgo").save(tmp_path / "mlp.dlinfer")
    with dlinfer.load(tmp_path / "mlp.dlinfer") as session:
        assert relative(session.run({"x": x})["output"], model(x)) < 1e-6


def test_without_what_writes_onnx_the_engine_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        EngineUnavailableError,
        match=r"onnxscript not installed; install them with: pip install 'dlinfer\[sophgo\]'",
    ):
        SophgoEngine()


def test_the_engine_tells_the_compiler_it_depends_on(toolchain, tmp_path):
    assert ENGINE.identity(tmp_path) == compiler_process.compiler_version()
    assert ENGINE.identity(tmp_path).startswith("tpu_mlir-")
