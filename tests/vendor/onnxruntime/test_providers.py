"""Execution providers: none is passed over in silence.

The wheel from PyPI has a second provider, Azure's, that takes no node of ONNX's ops: a real fallback to the CPU.
"""

from pathlib import Path

import pytest
import torch

from dlinfer.errors import (
    CompileOptionError,
    GraphFallbackError,
    ProviderFallbackError,
    ProviderUnavailableError,
)
from dlinfer.graph.options import CompileOptions
from dlinfer.ops.core import fallback
from dlinfer.vendor.onnxruntime import sessions
from dlinfer.vendor.onnxruntime.options import OrtOptions
from tests.vendor.onnxruntime.regions import ENGINE, as_in_eager, compiled, subgraph

CPU, AZURE = "CPUExecutionProvider", "AzureExecutionProvider"


@pytest.fixture(autouse=True)
def nothing_counted():
    fallback.reset()


@pytest.fixture
def azure():
    import onnxruntime

    if AZURE not in onnxruntime.get_available_providers():
        pytest.skip(f"this onnxruntime was built without {AZURE}")


def function(x):
    return torch.relu(x @ x.t()) + 1


VALUE = torch.randn(4, 4)


@pytest.mark.usefixtures("azure")
@pytest.mark.parametrize("weights", ["shared", "constant"])
def test_nodes_left_to_the_cpu_are_refused_by_count_and_kind(weights):
    with pytest.raises(ProviderFallbackError) as caught:
        compiled(function, VALUE, providers=[AZURE], weights=weights).run(VALUE)
    assert caught.value.fields["provider"] == AZURE
    assert "MatMul" in caught.value.fields["nodes"]
    assert "CPUExecutionProvider" in caught.value.step


@pytest.mark.usefixtures("azure")
def test_the_policy_may_let_them_pass_counted_and_said_once():
    with pytest.warns(fallback.FallbackWarning, match=f"because {AZURE} does not run them"):
        result = compiled(function, VALUE, providers=[AZURE], fallback="warn", weights="shared")
    as_in_eager(result.run, function, VALUE)
    (kind,) = fallback.counts()
    assert (kind.op, kind.vendor) == (AZURE, "onnxruntime")


@pytest.mark.usefixtures("azure")
def test_a_cpu_provider_that_was_asked_for_is_no_fallback():
    as_in_eager(compiled(function, VALUE, providers=[AZURE, CPU], weights="shared").run, function, VALUE)
    assert fallback.counts() == {}


def test_a_provider_that_onnx_runtime_drops_is_refused():
    class Session:
        def get_providers(self):
            return [CPU]

    with pytest.raises(ProviderUnavailableError) as caught:
        sessions._refuse_dropped(Session(), OrtOptions(providers=(AZURE, CPU)))
    assert caught.value.fields["provider"] == AZURE


def test_an_ep_context_that_no_provider_writes_is_refused(tmp_path):
    with pytest.raises(CompileOptionError, match=f"none of {CPU} did"):
        compiled(function, VALUE, ep_context=str(tmp_path / "contexts"))


@pytest.mark.parametrize("weight", [torch.tensor(3.0), torch.ones(2, 3).t(), torch.empty(0)])
def test_any_weight_is_part_of_an_ep_context_s_name(tmp_path, weight):
    options = OrtOptions(ep_context=tmp_path)
    path = sessions._context_file(b"model", options, {"w": weight})
    assert path == sessions._context_file(b"model", options, {"w": weight.clone()})
    assert not weight.numel() or path != sessions._context_file(b"model", options, {"w": weight + 1})


def test_an_ep_context_that_lies_there_is_loaded(tmp_path, monkeypatch):
    """What a provider compiled is an ONNX model too; here one that the CPU provider can load."""
    seen = []
    create = sessions._created

    def asked(settings):
        try:
            return settings.get_session_config_entry("ep.context_file_path")
        except RuntimeError:  # nobody asked for one
            return ""

    def writing(source, settings, options):
        seen.append(source)
        session = create(source, settings, options)
        if isinstance(source, bytes) and (path := asked(settings)):
            Path(path).write_bytes(source)
        return session

    monkeypatch.setattr(sessions, "_created", writing)
    for _ in range(2):
        as_in_eager(compiled(function, VALUE, ep_context=tmp_path / "contexts").run, function, VALUE)
    (written,) = (tmp_path / "contexts").iterdir()
    sources = [source for source in seen if source == str(written)]
    assert len(sources) == 1  # the second time


@pytest.mark.parametrize("level", ["disable", "basic", "extended", "all"])
@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_levels_and_modes_give_the_same_results(level, mode):
    run = compiled(function, VALUE, graph_optimization=level, execution_mode=mode, intra_op_threads=1).run
    as_in_eager(run, function, VALUE)


def test_what_onnx_runtime_itself_refuses_is_left_to_torch_under_the_policy(monkeypatch):
    def refuse(*args, **kwargs):
        raise sessions.SessionRefusedError("no such kernel")

    monkeypatch.setattr(sessions, "make_session", refuse)
    with pytest.raises(GraphFallbackError, match="no such kernel"):
        compiled(function, VALUE)
    options = CompileOptions(engine="onnxruntime", fallback="allow")
    result = ENGINE.compile(subgraph(function, VALUE), options)
    as_in_eager(result.run, function, VALUE)
    assert set(result.refused.values()) == {"ONNX Runtime: no such kernel"}


def test_an_invalid_model_is_refused_with_its_reason():
    reason = sessions.why_refused(b"no model")
    assert reason is not None and "protobuf" in reason.lower()
