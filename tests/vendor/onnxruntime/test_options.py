"""The engine's options: every value checked before anything is compiled."""

from pathlib import Path

import pytest

from dlinfer.errors import CompileOptionError, ProviderUnavailableError
from dlinfer.vendor.onnxruntime.engine import OnnxRuntimeEngine
from dlinfer.vendor.onnxruntime.options import OrtOptions

CPU, AZURE = "CPUExecutionProvider", "AzureExecutionProvider"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, OrtOptions()),
        ({"providers": [AZURE, CPU]}, OrtOptions(providers=(AZURE, CPU))),
        ({"providers": f"{AZURE}, {CPU}"}, OrtOptions(providers=(AZURE, CPU))),
        ({"providers": f"{AZURE};{CPU}"}, OrtOptions(providers=(AZURE, CPU))),
        (
            {"provider_options": {CPU: {"arena": 1}}},
            OrtOptions(provider_options={CPU: {"arena": "1"}}),
        ),
        ({"graph_optimization": "basic"}, OrtOptions(graph_optimization="basic")),
        (
            {"execution_mode": "parallel", "inter_op_threads": 2},
            OrtOptions(execution_mode="parallel", inter_op_threads=2),
        ),
        ({"intra_op_threads": 3}, OrtOptions(intra_op_threads=3)),
        ({"weights": "constant"}, OrtOptions(weights="constant")),
        ({"accuracy_level": 4}, OrtOptions(accuracy_level=4)),
        ({"ep_context": "there"}, OrtOptions(ep_context=Path("there"))),
        ({"ep_context": None}, OrtOptions()),
    ],
)
def test_values_are_read(given, read):
    assert OrtOptions.of(given) == read


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"provider": CPU}, "provider", "providers, provider_options, graph_optimization"),
        ({"providers": []}, "providers", "at least one"),
        ({"providers": ""}, "providers", "names of execution providers"),
        ({"providers": [CPU, CPU]}, "providers", "none of them twice"),
        ({"providers": 7}, "providers", "names of execution providers"),
        ({"providers": [CPU, None]}, "providers", "names of execution providers"),
        ({"provider_options": {AZURE: {}}}, "provider_options", f"one of the chosen providers: {CPU}"),
        ({"provider_options": {CPU: "fast"}}, "provider_options", "a dict that maps each provider"),
        ({"provider_options": "fast"}, "provider_options", "a dict that maps each provider"),
        ({"graph_optimization": "most"}, "graph_optimization", "'disable', 'basic', 'extended', 'all'"),
        ({"execution_mode": "both"}, "execution_mode", "'sequential', 'parallel'"),
        ({"weights": "copied"}, "weights", "'shared', 'constant'"),
        ({"intra_op_threads": -1}, "intra_op_threads", "0 or more"),
        ({"intra_op_threads": True}, "intra_op_threads", "0 or more"),
        ({"inter_op_threads": "2"}, "inter_op_threads", "0 or more"),
        ({"accuracy_level": 5}, "accuracy_level", "0 to 4"),
        ({"accuracy_level": -1}, "accuracy_level", "0 to 4"),
        ({"accuracy_level": True}, "accuracy_level", "0 to 4"),
        ({"accuracy_level": "int8"}, "accuracy_level", "0 to 4"),
        ({"ep_context": 3}, "ep_context", "a folder"),
        ({"ep_context": ""}, "ep_context", "a folder"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given, name, expected):
    with pytest.raises(CompileOptionError) as caught:
        OrtOptions.of(given)
    assert caught.value.fields["option"] == f"engine_options[{name!r}]"
    assert expected in str(caught.value)


def test_a_provider_that_is_not_installed_is_refused_before_a_model_is_compiled():
    with pytest.raises(ProviderUnavailableError) as caught:
        OnnxRuntimeEngine().check_options({"providers": ["NoSuchExecutionProvider"]})
    assert caught.value.fields["provider"] == "NoSuchExecutionProvider"
    assert CPU in caught.value.fields["available"]
    assert "onnxruntime-gpu" in caught.value.step


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        ({}, False),
        ({"weights": "constant"}, True),
        ({"providers": [AZURE, CPU]}, True),  # others than the CPU provider compile weights in
        ({"providers": [AZURE, CPU], "weights": "shared"}, False),
    ],
)
def test_weights_are_built_in_where_that_was_asked_for_or_a_provider_needs_it(given, holds):
    assert OrtOptions.of(given).holds_weights == holds
