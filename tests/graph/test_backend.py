"""The backend as its users meet it: failures while running, variants, reports, and transformers' generate."""

import traceback
from typing import Any

import pytest
import torch
from torch import nn

from dlinfer.errors import EngineUnavailableError, GraphRunError
from dlinfer.graph.report import report
from tests.graph.compiling import StubEngine, compiled, interpreted_engine, last_report, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(params=["stub", "inductor, interpreted"])
def engine(request, monkeypatch):
    chosen = StubEngine() if request.param == "stub" else interpreted_engine(monkeypatch)
    use_engine(monkeypatch, chosen)
    return chosen


def picks(x, index):
    y = x * 2 + 1
    return y.index_select(0, index) + 1


def test_a_failing_step_names_region_node_and_line_and_the_model_stays_usable(engine):
    run = compiled(picks)
    x, good, bad = torch.arange(6.0), torch.tensor([1, 2]), torch.tensor([1, 99])
    line = picks.__code__.co_firstlineno + 2
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(x, good), picks(x, good))
            with pytest.raises(GraphRunError) as caught:
                run(x, bad)
            text = str(caught.value)
            for part in ("region_0 failed", "index_select", f"{__file__}:{line}, in picks", "IndexError"):
                assert part in text
    assert len(report.reports()) == 1, "the error compiled nothing again"


def test_an_engine_that_throws_in_the_middle_of_a_run(monkeypatch):
    calls = []

    class Failing(StubEngine):
        def resolve(self, callee):
            function = super().resolve(callee)

            def counted(*args, **kwargs):
                calls.append(callee)
                if "sin" in callee and len(calls) == 6:
                    raise RuntimeError("device lost")
                return function(*args, **kwargs)

            return counted

    use_engine(monkeypatch, Failing())
    x, cache = torch.ones(3), torch.zeros(3)

    def model(x, cache):
        cache.add_(x)
        return (cache * 2).sin()

    run = compiled(model)
    with torch.no_grad():
        run(x, cache)
        with pytest.raises(
            GraphRunError, match=r"region_0 failed at node '\w*sin\w*'.*in model: RuntimeError: device lost"
        ):
            run(x, cache)  # the sixth step; the next call starts anew
        torch.testing.assert_close(run(x, cache), model(x, torch.full((3,), 2.0)))


def test_memory_that_runs_out_in_a_step(engine):
    def grows(x, count):
        return (x * 2 + 1).unsqueeze(0).repeat(count, 1) + 1

    run = compiled(grows, dynamic=True)
    x = torch.ones(4)
    with torch.no_grad():
        torch.testing.assert_close(run(x, 3), grows(x, 3))
        with pytest.raises(GraphRunError, match="memory"):
            run(x, 1 << 50)
        torch.testing.assert_close(run(x, 5), grows(x, 5))
    assert len(report.reports()) == 1


def test_an_engine_that_cannot_compile_is_told(monkeypatch):
    class Broken(StubEngine):
        def compile(self, region, options):
            raise RuntimeError("no compiler here")

    use_engine(monkeypatch, Broken())
    with torch.no_grad(), pytest.raises(Exception, match="no compiler here"):
        compiled(lambda x: x * 2)(torch.ones(3))


def test_one_graph_serves_all_sizes_and_size_1_is_a_variant(engine):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    run = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 2, 7, 1, 100, 1):
            torch.testing.assert_close(run(torch.ones(rows, 8)), model(torch.ones(rows, 8)))
    first, second = report.reports()
    assert first.variant == ()
    assert second.variant != ()
    assert first.cause == "first call" != second.cause


def test_the_report_of_a_graph(engine):
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
    with torch.no_grad():
        compiled(model)(torch.ones(3, 8))
    told = last_report()
    assert "aten.linear" in told.captured
    assert {"capture", "passes", "partition", "compile"} <= set(told.seconds)
    assert {node.op for node in told.nodes} >= {"aten.linear", "aten.silu"}
    assert told.engine == engine.name


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, pytest.param(1, marks=pytest.mark.full)])
def test_transformers_generate_with_a_static_cache(batch):
    from transformers import CompileConfig

    model = tiny_llama()
    tokens = torch.arange(batch * 5).view(batch, 5) % 60 + 1
    given = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, **given)
    config = CompileConfig(backend="dlinfer", fullgraph=True)
    # Transformers compiles on accelerators only, unless it is told to.
    setattr(config, "_compile_all_devices", True)  # noqa: B010 -- a private field, which its class does not declare
    ours = model.generate(tokens, cache_implementation="static", compile_config=config, **given)
    assert torch.equal(ours, expected)
    assert report.reports(), "generate compiled nothing"
    assert all(not told.refused and not told.refusals() for told in report.reports())


def test_a_refusal_is_a_new_error_at_each_call():
    """One that is kept would gather the way of every raise."""
    run = compiled(lambda x: x * 2, engine="nosuch")
    found = []
    for _ in range(20):
        with pytest.raises(EngineUnavailableError) as caught:
            run(torch.ones(2))
        found.append(caught.value)
    assert len(set(map(id, found))) == len(found)
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in found[1:]}) == 1
    assert len({str(error) for error in found}) == 1
