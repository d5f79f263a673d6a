"""Clusters: compiled once where they are equal, apart where they are not, kept on disk with what they assumed."""

import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

from dlinfer.graph.cache import disk
from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.graph.ir.extract import extract
from dlinfer.graph.torch_private import inductor
from dlinfer.vendor.cpu.inductor import clusters
from dlinfer.vendor.cpu.inductor.clusters import ClusterCompiler
from tests.graph.passes.fusion.capturing import captured

x = torch.arange(24.0).view(4, 6)


class Compilations(list):
    """Stands in for the code generator: notes each graph, and runs it as it is."""

    def __call__(self, graph, fakes, mode):
        self.append(graph)
        return graph


@pytest.fixture
def compilations(monkeypatch):
    noted = Compilations()
    monkeypatch.setattr(clusters.inductor, "compile_loops", noted)
    return noted


def subgraph_of(function, *args, dynamic=True):
    """All calls of a captured function as one cluster."""
    one = captured(function, *args, dynamic=dynamic).graph_module
    calls = [node for node in one.graph.nodes if node.op == "call_function"]
    outputs = set(one.graph.output_node().all_input_nodes)
    cut = extract(one, calls, "cluster")
    assert outputs <= set(cut.outputs)
    return cut


def compile_all(tmp_path, *subgraphs):
    compiler, store = ClusterCompiler(), ArtifactCache(tmp_path, "inductor")
    return compiler, [compiler.compile(one, store) for one in subgraphs]


def body(x):
    return (x * 2 + 1).sin()


def test_equal_clusters_are_compiled_once(tmp_path, compilations):
    _, made = compile_all(
        tmp_path, subgraph_of(body, x), subgraph_of(lambda renamed: (renamed * 2 + 1).sin(), x + 1)
    )
    (first, one), (second, other) = made
    assert first == second
    assert (one.origin, other.origin) == ("compiled", "shared")
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda x: (x * 2 + 1).cos(), x),
        (lambda x: (x * 2.5 + 1).sin(), x),
        (lambda x: (x * 2 - 1).sin(), x),
        (body, x.double()),
        (body, x.bfloat16()),
        (body, x.t()),
        (body, x[None]),
        (lambda x: ((x * 2 + 1).sin(), x * 2), x),
    ],
    ids=["op", "number", "sign", "float64", "bfloat16", "strides", "dimensions", "outputs"],
)
def test_clusters_that_differ_are_apart(function, given, tmp_path, compilations):
    compiler, made = compile_all(tmp_path, subgraph_of(body, x), subgraph_of(function, given))
    assert made[0][0] != made[1][0]
    assert len(compilations) == 2
    for (name, _), one, value in zip(made, (body, function), (x, given), strict=True):
        sizes = [] if compiler is None else list(value.shape)
        expected = one(value)
        results = compiler.run(name)(*_given(compilations[made.index((name, _))], value, sizes))
        torch.testing.assert_close(tuple(results), expected if isinstance(expected, tuple) else (expected,))


def _given(graph, value, sizes):
    """The inputs of a cluster of one tensor: sizes where it takes numbers."""
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    (tensor,) = [one for one in fakes if isinstance(one, torch.Tensor)]
    known = {str(symbol): number for symbol, number in zip(tensor.shape, sizes, strict=True)}
    return [value if isinstance(one, torch.Tensor) else known[str(one)] for one in fakes]


def test_constants_are_part_of_a_clusters_identity(tmp_path, compilations):
    def with_constant(numbers):
        return lambda x: x * torch.tensor(numbers) + 1

    _, made = compile_all(
        tmp_path, *[subgraph_of(with_constant(numbers), x) for numbers in ([1.0] * 6, [2.0] * 6, [1.0] * 6)]
    )
    names = [name for name, _ in made]
    assert names[0] == names[2] != names[1]


def test_fixed_and_symbolic_sizes_are_apart(tmp_path, compilations):
    _, made = compile_all(tmp_path, subgraph_of(body, x), subgraph_of(body, x, dynamic=False))
    assert made[0][0] != made[1][0]


def test_layers_share_their_clusters(monkeypatch, compilations, graph_mode, tmp_path):
    from dlinfer.vendor.cpu.inductor.engine import InductorEngine
    from tests.graph.compiling import compiled, last_report, use_engine

    use_engine(monkeypatch, InductorEngine())
    layers = nn.Sequential(*[nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(5)])
    with torch.no_grad():
        torch.testing.assert_close(compiled(layers, cache_dir=tmp_path, small_regions="engine")(x), layers(x))
    (region,) = last_report().regions
    assert len(region.clusters) == len(compilations) == 3, (
        "the first norm, gelu with the next norm, the last gelu"
    )
    assert sorted(one.uses for one in region.clusters) == [1, 1, 4]


def test_what_inductor_cannot_compile_runs_node_by_node_and_is_reported(tmp_path, monkeypatch):
    def fails(graph, fakes, mode):
        raise RuntimeError("no C++ compiler\nfound here")

    monkeypatch.setattr(clusters.inductor, "compile_loops", fails)
    compiler, ((name, told),) = compile_all(tmp_path, subgraph_of(body, x, dynamic=False))
    assert (told.origin, told.reason) == ("eager", "inductor: RuntimeError: no C++ compiler")
    torch.testing.assert_close(compiler.run(name)(x)[0], body(x))


def test_a_damaged_library_of_inductor_s_is_compiled_again(tmp_path, monkeypatch):
    library = tmp_path / "inductor" / "x.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(library.parent))
    loops = clusters.inductor.compile_loops

    def loads(graph, fakes, mode):
        if library.exists():
            raise ImportError("file too short", path=str(library))
        return loops(graph, fakes, mode)

    monkeypatch.setattr(clusters.inductor, "compile_loops", loads)
    compiler, ((name, told),) = compile_all(tmp_path / "ours", subgraph_of(body, x, dynamic=False))
    assert (told.origin, library.exists()) == ("compiled", False)
    torch.testing.assert_close(compiler.run(name)(x)[0], body(x))


def test_assumptions_of_a_compilation_are_asked_of_later_graphs(tmp_path, monkeypatch):
    def assuming(graph, fakes, mode):
        (tensor,) = [one for one in fakes if isinstance(one, torch.Tensor)]
        assumed.append(bool(tensor.shape[0] < 100))
        return graph

    assumed: list[bool] = []
    monkeypatch.setattr(clusters.inductor, "compile_loops", assuming)
    sizes = (4, 5, 200, 300, 7)
    _, made = compile_all(tmp_path, *[subgraph_of(body, torch.ones(n, 6)) for n in sizes])
    names = [name for name, _ in made]
    assert names[0] == names[1] == names[4] != names[2] == names[3]
    assert [told.origin for _, told in made] == ["compiled", "shared", "compiled", "shared", "shared"]
    assert assumed == [True, False]


@pytest.mark.parametrize("refused", [None, "loops are wrong on this CPU"])
def test_what_runs_node_by_node_keeps_what_decomposing_assumed(refused, tmp_path, monkeypatch):
    """A decomposition may be for some sizes only, whatever compiles it afterwards."""
    decompose = clusters.fake_mode.trace_decomposed

    def assuming(function, fakes, mode, table):
        (tensor,) = [one for one in fakes if isinstance(one, torch.Tensor)]
        assert bool(tensor.shape[0] < 100) in (True, False)
        return decompose(function, fakes, mode, table)

    def fails(graph, fakes, mode):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(clusters.fake_mode, "trace_decomposed", assuming)
    monkeypatch.setattr(clusters.inductor, "compile_loops", fails)
    compiler, store = ClusterCompiler(), ArtifactCache(tmp_path, "inductor")
    made = [compiler.compile(subgraph_of(body, torch.ones(n, 6)), store, refused) for n in (4, 5, 200, 300)]
    names = [name for name, _ in made]
    assert names[0] == names[1] != names[2] == names[3]
    assert {told.origin for _, told in made} == {"eager"}


@pytest.mark.parametrize(
    "settings",
    [
        {"cpp.simdlen": 1},
        {"cpp.enable_floating_point_contract_flag": "fast"},
        {"post_grad_custom_pre_pass": print},
    ],
    ids=str,
)
def test_clusters_of_another_configuration_of_inductor_are_apart(settings, tmp_path, compilations):
    compiler, ((plain, _),) = compile_all(tmp_path, subgraph_of(body, x))
    store = ArtifactCache(tmp_path, "inductor")
    with torch._inductor.config.patch(settings):
        other, report = compiler.compile(subgraph_of(body, x), store)
        assert (other != plain, report.origin) == (True, "compiled")
        assert compiler.compile(subgraph_of(body, x), store) == (
            other,
            replace(report, origin="shared", seconds=mock.ANY),
        )
    again, report = compiler.compile(subgraph_of(body, x), store)
    assert (again, report.origin, len(compilations)) == (plain, "shared", 2)


@pytest.mark.full
def test_another_process_has_the_same_code_generator():
    code = "from dlinfer.vendor.cpu.inductor.clusters import code_generator\nprint(code_generator())"
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500)
        for _ in range(2)
    ]
    assert said[0].stdout == said[1].stdout == f"{clusters.code_generator()}\n"


def test_a_text_that_looks_like_a_symbol_is_no_symbol():
    lines = [
        clusters.spelled(subgraph_of(lambda x, how=how: torch.div(x, 3, rounding_mode=how), x).graph_module)
        for how in ("floor", "trunc")
    ]
    assert lines[0] != lines[1]
    graphs = [subgraph_of(body, x).graph_module for _ in range(2)]
    for graph, text in zip(graphs, ("s1", "s2"), strict=True):
        graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0].kwargs = {
            "mode": text
        }
    assert clusters.spelled(graphs[0]) != clusters.spelled(graphs[1])


def test_calls_of_a_library_are_as_inductor_sees_them():
    assert inductor.calls_library(torch.ops.aten.cumsum.default) in (True, False)
    assert not inductor.calls_library(torch.ops.aten.mul.Tensor)
    assert inductor.calls_library(torch.ops.aten._fft_r2c.default)


@pytest.mark.slow
def test_clusters_with_constants_of_their_own_are_not_kept(tmp_path):
    """Torch saves the code without the constants, and the loaded code asks for them."""

    def with_constant(x):
        return x * torch.tensor(7.0) + 1

    for _ in range(2):
        one = subgraph_of(with_constant, x)
        compiler, ((name, told),) = compile_all(tmp_path, one)
        assert told.origin == "compiled"
        assert not compiler.keeps(name)
        given = [torch.ones(7, 6) if isinstance(n.meta["val"], torch.Tensor) else 7 for n in one.inputs]
        torch.testing.assert_close(compiler.run(name)(*given)[0], torch.full((7, 6), 8.0))


@pytest.mark.slow
def test_empty_constants_of_a_cache_do_not_keep_a_cluster_from_disk(tmp_path):
    """Transformers' DynamicCache starts as ``torch.tensor([])``, and appends keys and values."""

    def append(x):
        return torch.cat([torch.tensor([]), x * 2 + 1], dim=-2)

    one = subgraph_of(append, x)
    given = [torch.ones(7, 6) if isinstance(n.meta["val"], torch.Tensor) else 7 for n in one.inputs]
    for origin in ("compiled", "disk"):
        compiler, ((name, told),) = compile_all(tmp_path, subgraph_of(append, x))
        assert (told.origin, compiler.keeps(name)) == (origin, True)
        torch.testing.assert_close(compiler.run(name)(*given)[0], torch.full((7, 6), 3.0))


@pytest.mark.slow
def test_a_second_process_finds_clusters_on_disk(tmp_path):
    def layered(x):
        return F.layer_norm(x * 2, (6,)) + 1

    one = subgraph_of(layered, x)
    first, ((name, told),) = compile_all(tmp_path, one)
    assert told.origin == "compiled"
    second, ((again, found),) = compile_all(tmp_path, subgraph_of(layered, x))
    assert (again, found.origin) == (name, "disk")
    third = ClusterCompiler()
    store = ArtifactCache(tmp_path, "inductor")
    assert third.load(name, store)
    for compiler in (first, second, third):
        given = [torch.ones(7, 6) if isinstance(n.meta["val"], torch.Tensor) else 7 for n in one.inputs]
        torch.testing.assert_close(compiler.run(name)(*given)[0], layered(torch.ones(7, 6)))

    (path,) = store.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    before = disk.counts().get("corrupt", 0)
    _, ((_, rebuilt),) = compile_all(tmp_path, subgraph_of(layered, x))
    assert rebuilt.origin == "compiled"
    assert disk.counts()["corrupt"] == before + 1
    assert not ClusterCompiler().load("unknown", store)
