"""dlinfer.explain: text, JSON and HTML of real compilations."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import dlinfer
from dlinfer import settings
from dlinfer.errors import ExplanationError
from dlinfer.explanation.explanation import Explanation, GraphBreak, of_process
from tests.caches import fresh_cache
from tests.graph.report.test_report import whole


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(8)
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return torch.mm(x, x.t() @ self.proj(self.norm(x)).mul(2).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def explained(tmp_path_factory) -> Explanation:
    torch.manual_seed(0)
    with settings.override(cache_dir=str(fresh_cache(tmp_path_factory.mktemp("cache")))):
        return dlinfer.explain(Model().eval(), torch.randn(3, 8), dynamic=True)


def masked(text: str) -> str:
    """Without times, sizes of memory, versions, idle passes, keys of clusters, folders and line numbers."""
    text = text.replace(str(Path(__file__).parent), "HERE")  # may look like anything that is masked below
    text = re.sub(r"# .*/(\w+\.py:)", r"# \1", text)  # torch leaves out the first letters of a folder's name
    text = re.sub(r"\d+(\.\d+)? (ms|s)\b", "TIME", text)
    text = re.sub(r"\d+(\.\d+)? [GMK]iB", "SIZE", text)
    text = re.sub(r"with dlinfer .*", "with VERSIONS", text)
    text = re.sub(r"made no changes: .*", "made no changes: PASSES", text)
    keys = list(dict.fromkeys(re.findall(r"\b[0-9a-f]{8}\b", text)))
    for index, key in enumerate(keys):
        text = text.replace(key, f"KEY{index}")
    text = re.sub(r"l_self_modules_layers_modules_(\d)_modules_(\w+)_parameters_weight_", r"layer\1_\2", text)
    text = re.sub(r"[^\s(]*/(\w+\.py)", r"\1", text)
    text = re.sub(r"(\w+\.py):\d+", r"\1:N", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_text(explained):
    assert_expected_inline(
        masked(explained.to_text()),
        """\
dlinfer explain: tests.explanation.test_explanation.Model
  graphs           1
  in the engine    100% (12 of 12 nodes that compute)
  matrix products  100% of their operations in the engine
  recompiles       0
  size-1 variants  0
  graph breaks     0
  fused            rms_norm 2
  disk cache       missed 1, stored 1
  time             TIME
  with VERSIONS

=== graph 0: forward (test_explanation.py:N)
  engine  inductor
  cause   first call
  time    capture TIME, passes TIME, partition TIME, compile TIME
  memory  peak before SIZE, weights 576 bytes, written inputs 0 bytes, held 0 bytes, peak after SIZE
--- symbols
  s77  2 and more, x.size()[0]
  s27  8, x.size()[1]
--- guards
  Eq(s27, 8)  return self.weight * wide.to(x.dtype)  # test_explanation.py:N in forward
--- passes
  remove_noops: 4 edits in TIME, 31 nodes after it
    drop aten.to.dtype: to -> l_x_
      test_explanation.py:N, in forward
    drop aten.to.dtype: to_1 -> mul
      test_explanation.py:N, in forward
    drop aten.to.dtype: to_2 -> mm
      test_explanation.py:N, in forward
    drop aten.to.dtype: to_3 -> mul_3
      test_explanation.py:N, in forward
  rms_norm: 2 edits in TIME, 21 nodes after it
    pow_1, mean, add, rsqrt, mul, mul_1 -> rms_norm_default
      test_explanation.py:N, in forward
    pow_2, mean_1, add_1, rsqrt_1, mul_3, mul_4 -> rms_norm_default_1
      test_explanation.py:N, in forward
  made no changes: PASSES
--- regions
  region_0: 14 nodes for inductor
--- clusters
  KEY0  2 ×, 2 elementary nodes, compiled in TIME
--- kernels
  native rms_norm         2 ×
  native linear           2 ×
  op aten.matmul.default  2 ×
  op aten.mm.default      2 ×
--- captured graph
  s77: s77 = input
  l_x_: float32[s77, 8] = input
  layer0_norm: float32[8] = input
  layer0_proj: float32[8, 8] = input
  layer1_norm: float32[8] = input
  layer1_proj: float32[8, 8] = input
  t: float32[8, s77] = aten.t(l_x_)
  to: float32[s77, 8] = aten.to.dtype(l_x_, torch.float32)
  pow_1: float32[s77, 8] = aten.pow.Tensor_Scalar(to, 2)
  mean: float32[s77, 1] = aten.mean.dim(pow_1, [-1], True)
  add: float32[s77, 1] = aten.add.Tensor(mean, 1e-06)
  rsqrt: float32[s77, 1] = aten.rsqrt(add)
  mul: float32[s77, 8] = aten.mul.Tensor(to, rsqrt)
  to_1: float32[s77, 8] = aten.to.dtype(mul, torch.float32)
  mul_1: float32[s77, 8] = aten.mul.Tensor(layer0_norm, to_1)
  linear: float32[s77, 8] = aten.linear(mul_1, layer0_proj)
  mul_2: float32[s77, 8] = aten.mul.Tensor(linear, 2)
  tanh: float32[s77, 8] = aten.tanh(mul_2)
  matmul: float32[8, 8] = aten.matmul(t, tanh)
  mm: float32[s77, 8] = aten.mm(to, matmul)
  t_1: float32[8, s77] = aten.t(mm)
  to_2: float32[s77, 8] = aten.to.dtype(mm, torch.float32)
  pow_2: float32[s77, 8] = aten.pow.Tensor_Scalar(to_2, 2)
  mean_1: float32[s77, 1] = aten.mean.dim(pow_2, [-1], True)
  add_1: float32[s77, 1] = aten.add.Tensor(mean_1, 1e-06)
  rsqrt_1: float32[s77, 1] = aten.rsqrt(add_1)
  mul_3: float32[s77, 8] = aten.mul.Tensor(to_2, rsqrt_1)
  to_3: float32[s77, 8] = aten.to.dtype(mul_3, torch.float32)
  mul_4: float32[s77, 8] = aten.mul.Tensor(layer1_norm, to_3)
  linear_1: float32[s77, 8] = aten.linear(mul_4, layer1_proj)
  mul_5: float32[s77, 8] = aten.mul.Tensor(linear_1, 2)
  tanh_1: float32[s77, 8] = aten.tanh(mul_5)
  matmul_1: float32[8, 8] = aten.matmul(t_1, tanh_1)
  mm_1: float32[s77, 8] = aten.mm(to_2, matmul_1)
  return (mm_1,)
--- graph after the passes
  s77: s77 = input
  l_x_: float32[s77, 8] = input
  layer0_norm: float32[8] = input
  layer0_proj: float32[8, 8] = input
  layer1_norm: float32[8] = input
  layer1_proj: float32[8, 8] = input
  t: float32[8, s77] = aten.t(l_x_)
  rms_norm_default: float32[s77, 8] = dlinfer.rms_norm(l_x_, layer0_norm, 1e-06)
  linear: float32[s77, 8] = aten.linear(rms_norm_default, layer0_proj)
  mul_2: float32[s77, 8] = aten.mul.Tensor(linear, 2)
  tanh: float32[s77, 8] = aten.tanh(mul_2)
  matmul: float32[8, 8] = aten.matmul(t, tanh)
  mm: float32[s77, 8] = aten.mm(l_x_, matmul)
  t_1: float32[8, s77] = aten.t(mm)
  rms_norm_default_1: float32[s77, 8] = dlinfer.rms_norm(mm, layer1_norm, 1e-06)
  linear_1: float32[s77, 8] = aten.linear(rms_norm_default_1, layer1_proj)
  mul_5: float32[s77, 8] = aten.mul.Tensor(linear_1, 2)
  tanh_1: float32[s77, 8] = aten.tanh(mul_5)
  matmul_1: float32[8, 8] = aten.matmul(t_1, tanh_1)
  mm_1: float32[s77, 8] = aten.mm(mm, matmul_1)
  return (mm_1,)
--- where each node runs
  t                   aten.t float32[8, s77]: view
  rms_norm_default    dlinfer.rms_norm float32[s77, 8]: kernel native rms_norm
  linear              aten.linear float32[s77, 8]: kernel native linear
  mul_2               aten.mul.Tensor float32[s77, 8]: cluster KEY0 #1
  tanh                aten.tanh float32[s77, 8]: cluster KEY0 #1
  matmul              aten.matmul float32[8, 8]: kernel op aten.matmul.default
  mm                  aten.mm float32[s77, 8]: kernel op aten.mm.default
  t_1                 aten.t float32[8, s77]: view
  rms_norm_default_1  dlinfer.rms_norm float32[s77, 8]: kernel native rms_norm
  linear_1            aten.linear float32[s77, 8]: kernel native linear
  mul_5               aten.mul.Tensor float32[s77, 8]: cluster KEY0 #2
  tanh_1              aten.tanh float32[s77, 8]: cluster KEY0 #2
  matmul_1            aten.matmul float32[8, 8]: kernel op aten.matmul.default
  mm_1                aten.mm float32[s77, 8]: kernel op aten.mm.default""",
    )


def test_the_summary_begins_the_text(explained):
    summary = str(explained)
    assert explained.to_text().startswith(summary)
    assert len(summary.splitlines()) < 12


def test_figures(explained):
    assert explained.fired == {"rms_norm": 2}
    assert explained.coverage == 1.0
    assert explained.recompiles == explained.size_1_variants == explained.graph_breaks == []
    (graph,) = explained.graphs
    assert graph.kernels()["op aten.mm.default"] == 2
    assert {n.module for n in graph.nodes if n.op == "aten.linear"} == {"layers.0.proj", "layers.1.proj"}
    assert graph.memory["weights"] == 2 * (8 + 64) * 4
    assert graph.memory["held"] == 0  # weights are inputs; nothing of them is kept a second time
    assert graph.memory["peak after"] >= graph.memory["peak before"] > 0
    assert set(graph.seconds) >= {"capture", "passes", "partition", "compile"}
    assert explained.seconds > graph.seconds["compile"]


def test_results_are_the_models(explained):
    x = torch.randn(5, 8)
    model = explained._compiled.function._orig_mod
    with torch.no_grad():
        # two layers of float32 sums, in another order
        torch.testing.assert_close(explained.run(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(explained.graphs) == 1  # another size needs no other graph


def test_json_round_trip(explained):
    text = explained.to_json()
    found = json.loads(text)
    assert found["schema"] == 2
    assert (found["fired"], found["coverage"]) == (explained.fired, 1.0)
    again = Explanation.from_json(text)
    assert again == explained
    assert again.to_json() == text
    assert again.to_html() == explained.to_html()
    with pytest.raises(ExplanationError, match="has no model to run"):
        again.run(torch.ones(3, 8))


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"schema": 1}', '{"schema": 2, "model": "m"}'])
def test_other_json_is_refused(text):
    with pytest.raises(ExplanationError):
        Explanation.from_json(text)


def test_save_goes_by_the_suffix(explained, tmp_path):
    assert explained.save(tmp_path / "a.txt").read_text() == explained.to_text()
    assert explained.save(str(tmp_path / "a.json")).read_text() == explained.to_json()
    assert explained.save(tmp_path / "a.html").read_text() == explained.to_html()
    with pytest.raises(ExplanationError, match=r"'a.svg' does not end in one of .txt, .json, .html"):
        explained.save(tmp_path / "a.svg")


# --- the page


class Page(HTMLParser):
    """Checks that elements nest, and collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def assert_stands_alone(text: str) -> Page:
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "image", "use", "a")
        assert not {"src", "href", "xlink:href", "style", "srcset"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    for word in ("url(", "@import", "fetch(", "import(", "XMLHttpRequest"):
        assert word not in text
    assert "://" not in text
    return page


def test_the_page_is_well_formed_and_stands_alone(explained):
    page = assert_stands_alone(explained.to_html())
    assert [attributes for tag, attributes in page.tags if tag == "ol"] == [{"class": "blocks"}] * 2
    assert sum(tag == "table" for tag, _ in page.tags) >= 6
    for word in ("rms_norm", "layers.0", "x.size()[0]", "in forward"):
        assert word in explained.to_html()


NASTY = "</script><script>alert(1)</script><b onclick='x'>&amp;\"$title${body}"


def test_the_page_escapes_whatever_comes_from_a_model():
    graph = whole()
    for field in ("model", "engine", "cause", "captured", "lowered", "refused"):
        setattr(graph, field, NASTY)
    graph.guards, graph.symbols, graph.seconds = [NASTY], {NASTY: NASTY}, {NASTY: 1.0}
    graph.memory = {NASTY: 3}
    for node in graph.nodes:
        node.name = node.op = node.line = node.module = node.result = NASTY
        node.reason = NASTY if node.reason else ""
    page = assert_stands_alone(
        Explanation(
            NASTY, [graph], [GraphBreak(NASTY, NASTY, NASTY, 2)], 1.0, {NASTY: 1}, {NASTY: "1"}
        ).to_html()
    )
    assert sum(tag == "script" for tag, _ in page.tags) == 0
    assert [attributes for tag, attributes in page.tags if tag == "b" and attributes] == []


def test_of_process_has_what_was_compiled_so_far(explained):
    everything = of_process()
    assert any(graph is explained.graphs[0] for graph in everything.graphs)
    assert everything.model == "this process"
    assert everything.cache["stored"] >= explained.cache["stored"] > 0
