"""The engine's options: each bad one is refused with the valid ones; each good one reaches the compiler."""

from types import SimpleNamespace

import pytest
import torch

from dlinfer import settings
from dlinfer.errors import CompileOptionError
from dlinfer.vendor.openvino import devices
from dlinfer.vendor.openvino.devices import core, properties
from dlinfer.vendor.openvino.options import OpenVINOOptions
from tests.graph.compiling import compiled
from tests.vendor.openvino.lowering import ENGINE, lowered

pytestmark = pytest.mark.usefixtures("graph_mode")

BAD = [
    ({"colour": 1}, ["colour", "device, precision, weights, group_size", "num_threads"]),
    ({"precision": "fp8"}, ["'fp8'", "'model', 'f32', 'bf16', 'f16'"]),
    ({"weights": "int2"}, ["'int2'", "'model', 'int8', 'int4'"]),
    ({"device": ""}, ["the name of an OpenVINO device"]),
    ({"device": "TPU"}, ["'TPU'", "CPU"]),
    ({"group_size": 0}, ["an even number above 0"]),
    ({"group_size": 33}, ["an even number above 0"]),
    ({"num_threads": -1}, ["0 or above"]),
    ({"num_threads": True}, ["0 or above"]),
    ({"dynamic_quantization_group_size": 1.5}, ["0 or above"]),
]


@pytest.mark.parametrize(
    ("given", "told"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_bad_option_is_refused_with_the_valid_ones(given, told):
    with pytest.raises(CompileOptionError) as caught:
        ENGINE.check_options(given)
    for part in told:
        assert part in str(caught.value)


def test_through_torch_compile_and_the_settings():
    run = compiled(lambda x: x + 1, engine="openvino", engine_options={"precision": "fp8"})
    with torch.no_grad(), pytest.raises(CompileOptionError, match="fp8"):
        run(torch.ones(2))
    with (
        settings.override(engine="openvino", engine_options="weights=int3"),
        torch.no_grad(),
        pytest.raises(CompileOptionError, match="int3"),
    ):
        compiled(lambda x: x + 2)(torch.ones(2))


def test_what_would_change_numbers_is_always_said():
    said = properties(OpenVINOOptions(), "f32", "")
    assert said["INFERENCE_PRECISION_HINT"] == said["KV_CACHE_PRECISION"] == "f32"
    assert said["EXECUTION_MODE_HINT"] == "ACCURACY"
    kept = properties(OpenVINOOptions(), "f32", "f16")
    assert {kept[f"{of}_CACHE_PRECISION"] for of in ("KV", "KEY", "VALUE")} == {"f16"}  # the caches' own
    assert said["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "0"
    assert said["INFERENCE_NUM_THREADS"] == torch.get_num_threads()


@pytest.mark.parametrize("capabilities", [["FP32", "BF16"], ["FP32", "BF16", "FP16"]])
def test_float16_is_asked_for_only_where_the_cpu_computes_in_it(capabilities, monkeypatch):
    """Elsewhere the plugin takes bfloat16 for it, where the CPU has that."""
    monkeypatch.setattr(
        devices, "core", lambda: SimpleNamespace(get_property=lambda device, name: capabilities)
    )
    hint = "f16" if "FP16" in capabilities else "f32"
    for options in (OpenVINOOptions(), OpenVINOOptions(precision="f16")):
        assert properties(options, "f16", "")["INFERENCE_PRECISION_HINT"] == hint
    assert properties(OpenVINOOptions(device="GPU"), "f16", "")["INFERENCE_PRECISION_HINT"] == "f16"


def test_options_reach_the_compiler():
    chosen = OpenVINOOptions.of(
        {"precision": "bf16", "num_threads": 1, "dynamic_quantization_group_size": 32}
    )
    said = properties(chosen, "f32", "")
    assert (said["INFERENCE_PRECISION_HINT"], said["KV_CACHE_PRECISION"]) == ("bf16", "bf16")
    assert (said["INFERENCE_NUM_THREADS"], said["DYNAMIC_QUANTIZATION_GROUP_SIZE"]) == (1, "32")
    assert "KV_CACHE_PRECISION" not in properties(OpenVINOOptions(device="GPU"), "f16", "")
    assert "CPU" in core().available_devices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_s_own_precision_is_the_hint(dtype, monkeypatch):
    from dlinfer.vendor.openvino import lowered as module

    seen = []
    monkeypatch.setattr(
        module,
        "properties",
        lambda options, precision, cache: seen.append(precision) or properties(options, precision, cache),
    )
    x = torch.randn(3, 4, dtype=dtype)
    run, _ = lowered(lambda x: x @ x.t() + x.float().sum().to(dtype), x)
    run(x)
    # What came before are self-tests.
    assert seen[-1] == {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
