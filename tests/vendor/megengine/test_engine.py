"""The graph engine megengine: blocks of models in MegEngine Lite, against torch in float64."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import dlinfer
from dlinfer import settings
from dlinfer.errors import CompileOptionError, GraphFallbackError, GraphRunError
from dlinfer.vendor import discovery
from dlinfer.vendor.megengine.errors import LiteBuildError
from tests.graph.compiling import compiled, last_report
from tests.vendor.megengine.blocks import Attention, Perceptron, VisionBlock

HERE: dict[str, Any] = {"engine": "megengine", "fallback": "error"}
INPUTS = {Perceptron: (2, 5, 64), Attention: (2, 5, 64), VisionBlock: (2, 3, 32, 32)}


@pytest.fixture(autouse=True)
def fresh_dynamo_without_gradients():
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def close(given: torch.Tensor, model: nn.Module, *inputs: torch.Tensor) -> None:
    """Against the model in float64. float32: some hundred products and sums in a row of values of about 1."""
    expected = model.double()(*(one.double() if one.is_floating_point() else one for one in inputs))
    model.float()
    assert given.dtype == torch.float32
    torch.testing.assert_close(given.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", INPUTS)
def test_blocks_run_in_the_engine_under_fallback_error(kind):
    """Fallback ``error`` refuses a graph of which any node would run outside."""
    model = kind().eval()
    run = compiled(model, dynamic=False, **HERE)
    for _ in range(2):
        data = torch.randn(INPUTS[kind])
        close(run(data), model, data)
    found = last_report()
    assert [region.engine for region in found.regions] == ["megengine"]
    assert found.placed("eager") == []
    assert found.flops("engine") > 0.9 * sum(node.flops for node in found.nodes) > 0


def test_what_is_masked_out_leaves_no_trace():
    """Neither its NaN nor its infinities, in ``masked_fill`` and ``where``."""

    def function(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor):
        return x.masked_fill(mask, 2.5), torch.where(mask, y, x), torch.where(mask, x, y) * 2

    mask = torch.rand(4, 5) > 0.5
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    x[mask], y[~mask] = float("inf"), float("nan")
    x[0, :3] = torch.tensor([float("inf"), float("nan"), -float("inf")])
    run = compiled(function, dynamic=False, **HERE)
    for given, expected in zip(run(x, y, mask), function(x, y, mask), strict=True):
        torch.testing.assert_close(given, expected, equal_nan=True)


def test_grouped_heads():
    model = Attention(heads=4, kv_heads=2).eval()
    data = torch.randn(2, 5, 64)
    close(compiled(model, dynamic=False, **HERE)(data), model, data)


def test_weights_are_read_where_they_lie():
    model = Perceptron().eval()
    run = compiled(model, dynamic=False, **HERE)
    data = torch.randn(2, 5, 64)
    before = run(data)
    model.get_parameter("down.weight").mul_(2)
    after = run(data)
    close(after, model, data)
    assert not torch.allclose(before, after)
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})
    close(run(data), model, data)


def test_strided_inputs():
    model = Perceptron().eval()
    data = torch.randn(64, 5, 2).permute(2, 1, 0)
    close(compiled(model, dynamic=False, **HERE)(data), model, data)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.out(self.table(words)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_are_looked_up_and_range_checked(dtype):
    model = Words().eval()
    run = compiled(model, dynamic=False, **HERE)
    words = torch.tensor([[0, 19, 7], [1, 1, 2]], dtype=dtype)
    close(run(words), model, words)
    for wrong in (20, -1, 2**31 - 1):
        with pytest.raises(GraphRunError, match="index out of range"):
            run(torch.full((2, 3), wrong, dtype=dtype))
    close(run(words), model, words)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 4, 5, 8)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return mixed * 2.0


def test_attention_with_masks_and_rows_that_see_nothing():
    model, data = Masked().eval(), torch.randn(2, 4, 5, 8)
    seen = torch.rand(2, 1, 5, 5) > 0.4
    seen[0, 0, 3] = False
    run = compiled(model, dynamic=False, **HERE)
    torch.testing.assert_close(run(data, seen), model(data, seen), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    added = torch.zeros(5, 5).masked_fill(~seen[1, 0], float("-inf"))
    run = compiled(model, dynamic=False, **HERE)
    torch.testing.assert_close(run(data, added), model(data, added), rtol=1e-4, atol=1e-5)


class Layer(nn.Module):
    """A decoder's layer of transformers, with the angles of its positions given."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128
        )
        config._attn_implementation = "sdpa"
        self.layer = LlamaDecoderLayer(config, 0)
        self.angles = LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.layer(x, position_embeddings=(cos, sin), attention_mask=None)


def test_a_decoder_layer_of_transformers():
    pytest.importorskip("transformers", reason="the model is transformers'")
    model, data = Layer().eval(), torch.randn(2, 6, 64)
    inputs = (data, *model.angles(data, torch.arange(6)[None].expand(2, -1)))
    given = compiled(model, dynamic=False, **HERE)(*inputs)
    torch.testing.assert_close(given, model(*inputs), rtol=1e-4, atol=1e-5)


def test_a_vision_model_of_transformers():
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
    )
    model = transformers.ViTModel(config).eval()
    image = torch.randn(2, 3, 32, 32)
    given = compiled(model, dynamic=False, **HERE)(image).last_hidden_state
    torch.testing.assert_close(given, model(image).last_hidden_state, rtol=1e-4, atol=1e-4)


OPS: dict[str, Any] = {
    "arithmetic": lambda x, y: (x + y * 2 - 3) / (y + 4) - x.sub(y, alpha=2) + (1 - x),
    "unary": lambda x, y: (
        x.exp().log() + x.abs().sqrt() + x.sin() * y.cos() - x.neg().sigmoid() + y.reciprocal()
    ),
    "powers": lambda x, y: x.pow(2) + y.abs().pow(0.5) + (y * y + 1).pow(-0.5) + (x * x + 1).rsqrt(),
    "activations": lambda x, y: (
        nn.functional.gelu(x, approximate="tanh") + nn.functional.silu(y).tanh() + x.relu()
    ),
    "bounds": lambda x, y: x.clamp(-0.5, 0.5) + y.clamp(min=0) + torch.maximum(x, y) - torch.minimum(x, y),
    "reductions": lambda x, y: x.mean(1, keepdim=True) + y.sum(0) - x.amax(0) + x.amin((1,), True),
    "softmax": lambda x, y: x.softmax(0) + y.softmax(-1),
    "products": lambda x, y: (x @ y.t()) @ x + torch.addmm(x, x @ y.t(), y),
    "batches": lambda x, y: (x.view(2, 2, 6) @ y.view(2, 6, 2)) * 2,
    "comparisons": lambda x, y: torch.where(x >= y, x, y) + torch.where(x < 0.1, x, y * 1.0),
    "masks": lambda x, y: (x * 1.0).masked_fill(y > 0, -5.0),
    "places": lambda x, y: (
        torch.cat([x[1:3, ::2], y[:2, 1::2]], 1).transpose(0, 1).unsqueeze(0).squeeze(0) * 2
    ),
    "splits": lambda x, y: sum(x.split([2, 4], 1)[1].unbind(1)) * y.chunk(2, 1)[0].sum(1),
    "expansion": lambda x, y: (x[:, :1].expand(4, 6) + y[0].expand(4, 6)).permute(1, 0).contiguous() * 2,
}


def test_ops():
    """Each translation against torch in float64, in one graph; float32 rounds values of about 1 some ten times."""

    def everything(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, y) for function in OPS.values()]

    x, y = torch.rand(4, 6) + 0.1, torch.rand(4, 6) + 0.1
    results = compiled(Plain(everything), dynamic=False, **HERE)(x, y)
    expected = everything(x.double(), y.double())
    for name, given, right in zip(OPS, results, expected, strict=True):
        torch.testing.assert_close(
            given.double(), right, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_build_that_fails_is_run_by_torch_under_the_policy(monkeypatch):
    from dlinfer.vendor.megengine import engine

    def broken(graph: Any) -> bytes:
        raise LiteBuildError(detail="of the test's own")

    monkeypatch.setattr(engine, "model_of", broken)
    model, data = Perceptron().eval(), torch.randn(2, 5, 64)
    with pytest.raises(GraphFallbackError, match="of the test's own"):
        compiled(model, dynamic=False, **HERE)(data)
    torch.compiler.reset()
    given = compiled(model, dynamic=False, engine="megengine", fallback="allow")(data)
    torch.testing.assert_close(given, model(data))


def test_artifacts(tmp_path):
    """An artifact holds the graph; its model comes from the cache, or is built, where it is loaded."""
    model, data = Perceptron().eval(), torch.randn(2, 5, 64)
    dlinfer.compile(model, (data,), engine="megengine").save(tmp_path / "model.dlinfer")
    with dlinfer.load(tmp_path / "model.dlinfer") as session:
        close(session.run({"x": data})["output"], model, data)


class Several(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + y
        first, second = total.chunk(2, -1)
        larger = torch.where(first > second, first, second * -1.0)
        return larger, first > second, total, torch.stack([first, second], 1).mean(1).sqrt().tanh(), x


def test_several_results_conditions_and_views():
    model = Several()
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    results = compiled(model, dynamic=False, **HERE)(x, y)
    for given, expected in zip(results, model(x, y), strict=True):
        assert given.dtype == expected.dtype
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


class Plain(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


@pytest.mark.parametrize(
    ("function", "data", "why"),
    [
        (lambda x: (x + 1).cumsum(0), torch.ones(4, 4), "no translation to MegEngine"),
        (lambda x: (x + 1) * 2, torch.ones(4, 4, dtype=torch.float16), "float16"),
        (lambda x: (x + 1) * 2, torch.ones(4, 4, dtype=torch.bfloat16), "bfloat16"),
        (lambda x: (x + 1) * 2, torch.ones(4, 4, dtype=torch.float64), "float64"),
        (lambda x: (x + 1) * 2, torch.ones(4, 4, dtype=torch.int64), "int64"),
        (lambda x: (x + 1).sum() * 2, torch.ones(4, 4), "dimensions"),
        (lambda x: (x * 2).add_(1).mul_(x), torch.ones(2, 0), "without elements"),
        (lambda x: (x + torch.rand_like(x)) * 2, torch.ones(4, 4), "random generator"),
        (lambda x: (x + 1) ** 3, torch.ones(4, 4), "exponent is 3"),
        (
            lambda x: nn.functional.scaled_dot_product_attention(x + 1, x, x, attn_mask=x, is_causal=True),
            torch.ones(1, 1, 4, 4),
            "a mask and is_causal",
        ),
    ],
)
def test_nodes_are_refused_with_their_reason(function, data, why):
    try:
        function(data)
    except RuntimeError:  # torch 2.15 refuses a mask and is_causal
        with pytest.raises(Exception, match="is_causal"):
            compiled(Plain(function), dynamic=False, **HERE)(data)
        return
    with pytest.raises(GraphFallbackError, match=why):
        compiled(Plain(function), dynamic=False, **HERE)(data)


def test_what_is_refused_runs_by_torch_and_is_counted():
    model = Plain(lambda x: torch.relu((x * 2 + 1).cumsum(0) * 3 - 1))
    data = torch.randn(4, 4)
    run = compiled(model, dynamic=False, engine="megengine", fallback="allow")
    torch.testing.assert_close(run(data), model(data))
    assert ("aten.cumsum", "no translation to MegEngine") in last_report().refusals()
    assert len(last_report().regions) == 2


def test_changing_sizes_are_refused():
    with pytest.raises(GraphFallbackError, match="dynamic=False"):
        compiled(Perceptron().eval(), dynamic=True, **HERE)(torch.randn(2, 5, 64))


def test_options():
    model, data = Perceptron().eval(), torch.randn(2, 5, 64)
    for threads in (1, 2):
        torch.compiler.reset()
        options = HERE | {"engine_options": {"num_threads": threads}}
        close(compiled(model, dynamic=False, **options)(data), model, data)
    for wrong in ({"num_threads": -1}, {"threads": 2}):
        torch.compiler.reset()
        with pytest.raises(CompileOptionError, match=next(iter(wrong))):
            compiled(model, dynamic=False, **(HERE | {"engine_options": wrong}))(data)


def test_threads_may_call_one_compiled_model():
    model = Perceptron().eval()
    run = compiled(model, dynamic=False, **HERE)
    data = [torch.randn(2, 5, 64) for _ in range(3)]
    expected = [run(one) for one in data]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(run(data[index]), expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_models_are_kept_by_hash_and_a_damaged_one_is_made_anew(tmp_path, monkeypatch):
    from dlinfer.vendor.megengine import building
    from tests.vendor.megengine import models

    with settings.override(cache_dir=str(tmp_path)):
        # The toolchain lies in another cache folder than this test's.
        with settings.override(cache_dir=""):
            from dlinfer.toolchain import find
            from dlinfer.vendor.megengine.toolchain import TOOLCHAIN

            environment = find(TOOLCHAIN)
        monkeypatch.setattr(building, "find", lambda toolchain: environment)
        first = models.two_results()
        (entry,) = (tmp_path / "megengine").iterdir()
        monkeypatch.setattr(building, "_built", lambda text: pytest.fail("built again"))
        assert models.two_results() == first
        monkeypatch.undo()
        monkeypatch.setattr(building, "find", lambda toolchain: environment)
        entry.write_bytes(entry.read_bytes()[:-5])
        assert len(models.two_results()) == len(first)


def test_the_vendor():
    vendor = discovery.get("megengine")
    assert vendor.engines == ("megengine",)
    assert vendor.probe().available
    with settings.override(cache_dir="/nowhere"):
        answer = vendor.probe()
    assert not answer.available
    assert "not installed" in answer.reason
    assert answer.next_step == "dlinfer toolchain install megengine"
