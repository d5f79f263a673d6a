"""The graph engine qaic: regions as .onnx files through a Session; for real on onnxruntime, else the stand-in."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

import dlinfer
from dlinfer import settings
from dlinfer.errors import CompileOptionError, EngineResultError, GraphFallbackError
from dlinfer.graph.report import report
from dlinfer.vendor.qaic.errors import QaicUnavailableError
from dlinfer.vendor.qaic.session import Session
from tests.graph.compiling import compiled, last_report

pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript: pip install 'dlinfer[qaic]'")

HERE: dict[str, Any] = {"engine": "qaic", "engine_options": {"backend": "onnxruntime"}, "fallback": "error"}
CARD: dict[str, Any] = {"engine": "qaic", "fallback": "error"}


def but(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return options | changes


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()


def close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    # float32: sums of up to 16 products of about 1, and another erf.
    return given.dtype == expected.dtype and torch.allclose(given, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def fresh_dynamo_without_gradients():
    torch.compiler.reset()
    with torch.no_grad():
        yield


def test_a_model_runs_on_onnxruntime_at_every_size_with_one_compilation():
    model = perceptron()
    run = compiled(model, dynamic=True, **HERE)
    graphs = len(report.reports())
    for batch in (2, 5, 3):
        data = torch.randn(batch, 8)
        assert close(run(data), model(data))
    assert len(report.reports()) == graphs + 1
    region = last_report().regions[0]
    assert (region.engine, len(last_report().regions)) == ("qaic", 1)
    assert "Session(backend='onnxruntime')" in region.source
    assert region.notes == ["the session holds copies of 6 weights, 976 bytes"]


def test_an_index_that_torch_refuses_reaches_no_other_element():
    """ONNX counts negative indices from the end everywhere, torch's index_select does not."""

    def rows(x, index):
        return torch.index_select(x * 2, 0, index) + 1

    x, run = torch.randn(4, 6), compiled(rows, **HERE)
    assert close(run(x, torch.tensor([3, 0])), rows(x, torch.tensor([3, 0])))
    for index in (torch.tensor([-1, 0]), torch.tensor([4, 0])):
        with pytest.raises(IndexError):
            rows(x, index)
        with pytest.raises(RuntimeError):
            run(x, index)


def test_options_of_the_session_reach_it():
    model = perceptron()
    data = torch.randn(4, 8)
    options = {"backend": "onnxruntime", "convert_to_fp16": True}
    half = compiled(model, **but(HERE, engine_options=options))(data)
    assert half.dtype == torch.float32
    assert not torch.equal(half, model(data))
    # Weights and values rounded to 11 bits, through two layers and a norm.
    torch.testing.assert_close(half, model(data), rtol=2e-2, atol=2e-2)


def test_changed_weights_are_taken():
    model = perceptron()
    run = compiled(model, **HERE)
    data = torch.randn(3, 8)
    assert close(run(data), model(data))
    model.get_parameter("0.weight").mul_(2)
    assert close(run(data), model(data))
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert close(run(data), model(data))


def test_several_inputs_types_and_outputs():
    def function(tokens: torch.Tensor, table: torch.Tensor, mask: torch.Tensor):
        rows = table[tokens]
        return torch.where(mask[..., None], rows, 0.0), rows.sum(-1), tokens + 1, rows.transpose(0, 1)

    arguments = torch.randint(0, 7, (2, 3)), torch.randn(7, 4), torch.rand(2, 3) > 0.5
    for given, expected in zip(compiled(function, **HERE)(*arguments), function(*arguments), strict=True):
        assert given.dtype == expected.dtype
        assert given.stride() == expected.stride()
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda array: array.astype("float64"), r"torch.float64 \[3, 4\]"),
        (lambda array: array[:-1], r"torch.float32 \[2, 4\]"),
        (lambda array: array[None], r"torch.float32 \[1, 3, 4\]"),
    ],
)
def test_a_result_of_another_type_or_other_sizes_is_an_error(monkeypatch, change, given):
    """torch's ops behind the region trust what the graph says of it."""
    model = perceptron()
    run = compiled(model, **HERE)
    data = torch.randn(3, 8)
    run(data)
    honest = Session.run

    def wrong(self, arrays):
        return {name: change(array) for name, array in honest(self, arrays).items()}

    monkeypatch.setattr(Session, "run", wrong)
    with pytest.raises(EngineResultError, match=rf"returned {given} .*, not torch.float32 \[3, 4\]"):
        run(data)


def test_arguments_are_not_changed_and_results_are_the_callers():
    model = perceptron()
    run = compiled(model, **HERE)
    data = torch.randn(3, 8)
    kept = data.clone()
    first = run(data)
    first_kept = first.clone()
    run(data + 1)
    assert torch.equal(data, kept)
    assert torch.equal(first, first_kept)
    first.add_(1)
    assert close(run(data), model(data))


def test_strided_inputs():
    model = perceptron()
    data = torch.randn(8, 3).t()
    assert close(compiled(model, **HERE)(data), model(data))


def test_threads():
    model = perceptron()
    run = compiled(model, dynamic=True, **HERE)
    run(torch.randn(2, 8))
    wrong: list[int] = []

    def work(seed: int) -> None:
        data = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
        for _ in range(20):
            with torch.no_grad():
                if not close(run(data), model(data)):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_ahead_of_time():
    model = perceptron()
    data = torch.randn(3, 8)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    artifact = dlinfer.compile(model, (data,), dynamic_shapes=shapes, options=HERE)
    for batch in (2, 9):
        data = torch.randn(batch, 8)
        assert close(artifact(data), model(data))


def test_an_artifact_is_compiled_again_where_it_is_loaded(tmp_path):
    model = perceptron()
    data = torch.randn(3, 8)
    dlinfer.compile(model, (data,), options=HERE).save(tmp_path / "model.dlinfer")
    with settings.override(engine="qaic", engine_options="backend=onnxruntime", fallback="error"):
        session = dlinfer.load(tmp_path / "model.dlinfer")
        (output,) = session.run({session.get_input_name(session.get_graph_names()[0], 0): data}).values()
    assert close(output, model(data))


# --- what stays outside


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x: (x.to(torch.bfloat16) * 2).float(),
            "torch.bfloat16, which a Session's numpy arrays cannot have",
        ),
        (lambda x: x + torch.rand_like(x), "it draws from torch's random generator"),
        (lambda x: x.add_(1) * 2, "it writes into a tensor, but a Session returns new arrays"),
        (lambda x: torch.linalg.svd(x)[1] + 1, "translation to ONNX"),
    ],
    ids=["bfloat16", "random", "write", "no translation"],
)
def test_what_it_does_not_take_is_refused_by_node_with_the_reason(function, reason):
    with pytest.raises(GraphFallbackError, match=reason):
        compiled(function, **HERE)(torch.ones(3, 4))
    options = but(HERE, fallback="allow")
    torch.manual_seed(0)
    expected = function(torch.ones(3, 4))
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(function, **options)(torch.ones(3, 4)), expected)
    assert any(reason in node.reason for node in last_report().nodes)


def test_a_written_argument_is_written():
    def function(cache: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache.copy_(value * 2)
        return cache.sum() + 1

    ours, theirs = torch.zeros(4), torch.zeros(4)
    value = torch.randn(4)
    result = compiled(function, **but(HERE, fallback="allow"))(ours, value)
    torch.testing.assert_close(result, function(theirs, value))
    assert torch.equal(ours, theirs)


def test_a_region_that_is_no_function_runs_by_torch_under_the_policy():
    """An assertion on what the region computes would have to interrupt the Session."""

    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        torch._assert_async(doubled.sum() > 0)
        return doubled + 1

    with pytest.raises(GraphFallbackError, match="an assertion reads a value that the region computes"):
        compiled(function, **HERE)(torch.ones(3))
    run = compiled(function, **but(HERE, fallback="allow"))
    torch.testing.assert_close(run(torch.ones(3)), torch.full((3,), 3.0))
    with pytest.raises(Exception, match=r"(?i)assert"):
        run(-torch.ones(3))


def test_a_model_that_the_compiler_refuses_runs_by_torch_under_the_policy(compiler, stand_in):
    """The stand-in compiler knows no -io-crc."""
    model = perceptron()
    data = torch.randn(2, 8)
    options: dict[str, Any] = {"engine": "qaic", "engine_options": {"io_crc": True}, "dynamic": False}
    with pytest.raises(GraphFallbackError, match=r"cannot be compiled: .*unknown option -io-crc"):
        compiled(model, fallback="error", **options)(data)
    run = compiled(copy.deepcopy(model), fallback="allow", **options)
    for _ in range(2):
        assert close(run(data), model(data))
    assert "unknown option -io-crc" in last_report().regions[0].notes[0]
    assert len(last_report().regions[0].notes) == 1  # tried once


# --- a card


def test_without_sdk_a_card_is_refused_with_what_is_missing(without_sdk):
    with pytest.raises(QaicUnavailableError) as caught:
        compiled(perceptron(), engine="qaic")(torch.randn(2, 8))
    said = str(caught.value)
    assert "the Python package qaic is not installed" in said
    assert "'engine_options': {'backend': 'onnxruntime'}" in said


def test_a_model_of_fixed_sizes_is_compiled_for_the_card(stand_in):
    model = perceptron()
    data = torch.randn(2, 8)
    options = but(CARD, engine_options={"aic_num_cores": 2, "num_activations": 2})
    assert close(compiled(model, dynamic=False, **options)(data), model(data))
    assert stand_in.CALLS[-1][0] == "run"
    opened = [asked for name, asked in stand_in.CALLS if name == "Session"]
    assert opened[-1]["num_activations"] == 2


def test_sizes_that_change_are_no_qpcs(stand_in):
    model = perceptron()
    with pytest.raises(GraphFallbackError, match="a QPC is compiled for fixed sizes"):
        compiled(model, dynamic=True, **CARD)(torch.randn(2, 8))
    data = torch.randn(2, 8)
    run = compiled(copy.deepcopy(model), dynamic=True, **but(CARD, fallback="allow"))
    assert close(run(data), model(data))


# --- options


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"backend": "cuda"}, "Expected 'aic' or 'onnxruntime'"),
        ({"backand": "aic"}, "one of backend, num_activations"),
        ({"aic_num_cores": 0}, "an int of at least 1"),
        ({"onnx_define_symbol": {"s0": 1}}, "one of backend, num_activations"),
        ({"output_dir": "here"}, "one of backend, num_activations"),
        ({"enable_metrics": True}, "one of backend, num_activations"),
    ],
)
def test_options_that_it_does_not_have(options, complaint):
    with pytest.raises(CompileOptionError, match=complaint):
        compiled(perceptron(), engine="qaic", engine_options=options)(torch.randn(2, 8))


def test_the_engine_and_its_options_by_the_environment():
    with settings.override(
        engine="qaic", engine_options="backend=onnxruntime,aic_num_cores=1", fallback="error"
    ):
        model = perceptron()
        data = torch.randn(2, 8)
        assert close(compiled(model)(data), model(data))
    assert last_report().engine == "qaic"
