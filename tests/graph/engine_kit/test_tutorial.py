"""The engine of docs/guides/write_an_engine.md: the page's own code, installed as a package and run."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlinfer.errors import CompileOptionError
from dlinfer.graph import engine
from tests.graph.compiling import compiled, last_report, same_as_eager, use_engine

pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")
pytestmark = pytest.mark.usefixtures("graph_mode")

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "write_an_engine.md"
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SOURCE = BLOCKS[0]
WHOLE: dict[str, Any] = {"engine": "evaluator", "fallback": "error"}


@pytest.fixture(autouse=True)
def installed(plugins, monkeypatch):
    monkeypatch.setattr(engine, "_engines", {})
    plugins("evaluator", SOURCE)
    with torch.no_grad():
        yield


class Layer(nn.Module):
    """Attention with a norm before it, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


def test_a_whole_engine_has_at_most_80_lines():
    assert len(SOURCE.splitlines()) <= 80


def test_a_model_runs_wholly_in_it_at_every_size():
    model = Layer().eval()
    run = compiled(model, dynamic=True, **WHOLE)
    for rows in (3, 5, 4):
        x = torch.randn(2, rows, 16)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    report = last_report()
    assert [region.engine for region in report.regions] == ["evaluator"]
    assert report.placed("eager") == []


def test_a_changed_weight_is_taken():
    model = Layer().eval()
    run, x = compiled(model, dynamic=False, **WHOLE), torch.randn(2, 3, 16)
    run(x)
    model.get_parameter("up.weight").mul_(2)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert any("weights changed" in note for region in last_report().regions for note in region.notes)


def test_what_it_does_not_take_runs_by_torch_with_the_reason():
    def model(x, cache):
        cache.add_(x.sin() * 2)
        return torch.linalg.svd(x)[1].exp() + (x.bfloat16() * 2).float().sum() + cache.cos().tanh()

    x, ours, theirs = torch.rand(3, 3), torch.zeros(3, 3), torch.zeros(3, 3)
    run = compiled(model, engine="evaluator", fallback="allow")
    torch.testing.assert_close(run(x, ours), model(x, theirs), rtol=1e-4, atol=1e-5)
    assert torch.equal(ours, theirs)
    reasons = {node.op: node.reason for node in last_report().placed("eager")}
    assert reasons["aten.add_.Tensor"] == "it writes into a tensor, but the evaluator only returns new arrays"
    assert "translation" in " ".join(reasons.values())
    assert "bfloat16, which numpy does not have" in reasons.values()


def test_options():
    with pytest.raises(CompileOptionError, match="one of the engine's options: verbose"):
        compiled(lambda x: x + 1, **WHOLE, engine_options={"loud": 1})(torch.ones(2))
    with pytest.raises(CompileOptionError, match="0 to print nothing"):
        compiled(lambda x: x + 1, **WHOLE, engine_options={"verbose": -1})(torch.ones(2))


def test_the_engine_without_onnx(monkeypatch):
    """Weights are built in and taken again, sizes and writes come as the page says, and a node is refused by name."""
    scope: dict[str, Any] = {}
    exec(next(block for block in BLOCKS if "class InterpreterEngine" in block), scope)
    use_engine(monkeypatch, scope["InterpreterEngine"]())
    model = Layer().eval()
    run = compiled(model, dynamic=True, fallback="error")
    for rows in (3, 5, 4):
        x = torch.randn(2, rows, 16)
        torch.testing.assert_close(run(x), model(x))
    model.get_parameter("up.weight").mul_(2)
    torch.testing.assert_close(run(x), model(x))
    same_as_eager(lambda x, y: (x.mul_(2).t(), y.add_(x), x.exp()), torch.ones(2, 2), torch.ones(2, 2))
    same_as_eager(lambda x: x.exp().cumsum(0), torch.ones(3), fallback="allow")
    assert [node.reason for node in last_report().placed("eager")] == ["the runtime has no cumsum"]


def test_a_node_more_is_refused(monkeypatch):
    scope: dict[str, Any] = {"torch": torch, "Base": type(engine.find_engine("evaluator", "cpu"))}
    method = next(block for block in BLOCKS if block.startswith("def refuses_op"))
    exec("class More(Base):\n" + textwrap.indent(method, "    "), scope)
    use_engine(monkeypatch, scope["More"]())
    same_as_eager(lambda x: x.exp().sin().cumsum(0), torch.ones(3), fallback="allow")
    reasons = [node.reason for node in last_report().placed("eager")]
    assert reasons == ["cumsum loses precision in the evaluator"]
