"""With DLINFER_CPU_BATCH_INVARIANT=1 whatever depends on the batch is refused by name, before any weight is read."""

from collections.abc import Iterator
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.messages import QuantPolicy, SpeculativeConfig
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from lmdeploy.pytorch.models.module_map import MODULE_MAP
from transformers import PretrainedConfig

from dlinfer import settings
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model import invariance

VARIABLE = "DLINFER_CPU_BATCH_INVARIANT"


@pytest.fixture(autouse=True)
def asked() -> Iterator[None]:
    with settings.override(cpu_batch_invariant=True):
        yield


def config(name: str, **fields: Any) -> PretrainedConfig:
    made = PretrainedConfig(architectures=[name])
    for field, value in ({"max_position_embeddings": 64} | fields).items():
        setattr(made, field, value)
    return made


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp": 2}, "tp=2"),
        ({"quant_policy": 8}, "quant_policy=8"),
        ({"adapters": {"a": "/nowhere"}}, "LoRA adapters"),
    ],
)
def test_options_of_the_engine(options, named):
    with settings.override(cpu_batch_invariant=False):
        given = PytorchEngineConfig(device_type="cpu", **(options if "adapters" not in options else {}))
    given.adapters = options.get("adapters")
    with pytest.raises(UnsupportedFeatureError) as caught:
        invariance.check_engine_config(given)
    assert named in str(caught.value)
    assert VARIABLE in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cpu_activations": "int8"}, "DLINFER_CPU_ACTIVATIONS=int8"),
        ({"engine": "openvino"}, "DLINFER_ENGINE=openvino"),
        ({"vendor": "reference"}, "DLINFER_VENDOR=reference"),
    ],
)
def test_other_settings(changes, named):
    with settings.override(**changes), pytest.raises(UnsupportedFeatureError, match=named):
        PytorchEngineConfig(device_type="cpu")


def test_plain_options_are_served():
    PytorchEngineConfig(device_type="cpu", enable_prefix_caching=True, max_prefill_token_num=64)


def test_drafts():
    given = PytorchEngineConfig(device_type="cpu")
    drafts = SpeculativeConfig(method="eagle", model="/nowhere")
    with pytest.raises(UnsupportedFeatureError, match="speculative decoding"):
        invariance.check_drafts(given)
    build: Any = ConfigBuilder.build_specdecode_config
    with pytest.raises(UnsupportedFeatureError, match="speculative decoding"):
        build("/nowhere", drafts, given, None, None)


@pytest.mark.parametrize("name", MODULE_MAP)
def test_models(name):
    if name in invariance.COMPARED:
        invariance.check_model(config(name), "cpu")
        return
    with pytest.raises(UnsupportedFeatureError, match=name):
        invariance.check_model(config(name), "cpu")


def test_sliding_windows():
    fields = {"model_type": "mixtral", "num_hidden_layers": 2}
    invariance.check_model(config("MixtralForCausalLM", sliding_window=None, **fields), "cpu")
    with pytest.raises(UnsupportedFeatureError, match="sliding windows"):
        invariance.check_model(config("MixtralForCausalLM", sliding_window=16, **fields), "cpu")


def test_frequencies_by_length():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(UnsupportedFeatureError, match="rope type 'dynamic'"):
        invariance.check_model(config("LlamaForCausalLM", rope_parameters=scaling), "cpu")


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("LlamaForCausalLM", {"quant_method": "fp8"}),
        ("LlamaForCausalLM", {"quant_method": "smooth_quant", "quant_dtype": "float8_e4m3fn"}),
        ("MixtralForCausalLM", {"quant_method": "awq"}),
    ],
)
def test_quantised_weights(name, stored):
    with pytest.raises(UnsupportedFeatureError, match=f"{name} quantised as {stored['quant_method']}"):
        invariance.check_model(config(name, quantization_config=stored), "cpu")


def test_weights_that_are_rounded_in_place():
    PytorchEngineConfig(device_type="cpu")
    with (
        settings.override(cpu_weights="int8", cpu_batch_invariant=True),
        pytest.raises(UnsupportedFeatureError, match="DLINFER_CPU_WEIGHTS=int8 of Qwen3MoeForCausalLM"),
    ):
        invariance.check_model(config("Qwen3MoeForCausalLM"), "cpu")
    with settings.override(cpu_weights="bf12", cpu_batch_invariant=True):
        invariance.check_model(config("Qwen3MoeForCausalLM"), "cpu")


def test_gguf_files():
    with pytest.raises(UnsupportedFeatureError, match="a GGUF file with DLINFER_CPU_BATCH_INVARIANT=1"):
        invariance.check_model(config("LlamaForCausalLM", gguf_file="model.gguf"), "cpu")


@pytest.mark.parametrize("stored", [{"quant_method": "awq"}, {"quant_method": "smooth_quant"}])
def test_served_quantised_weights(stored):
    invariance.check_model(config("Qwen2ForCausalLM", quantization_config=stored), "cpu")


def test_nothing_is_refused_unless_asked():
    with settings.override(cpu_batch_invariant=False):
        invariance.check_model(config("Gemma2ForCausalLM"), "cpu")
        PytorchEngineConfig(device_type="cpu", quant_policy=QuantPolicy.INT8)
