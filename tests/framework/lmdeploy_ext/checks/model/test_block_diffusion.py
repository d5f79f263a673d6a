"""What block diffusion refuses, and what of a configuration LMDeploy overlooks."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmdeploy")

from lmdeploy import GenerationConfig, PytorchEngineConfig
from lmdeploy.messages import SpeculativeConfig
from lmdeploy.pytorch.config import DistConfig, DLLMConfig, ModelConfig
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from lmdeploy.pytorch.messages import SamplingParam
from transformers import PretrainedConfig, Qwen3Config

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model import block_diffusion


@pytest.fixture(autouse=True)
def on_a_device():
    PytorchEngineConfig(device_type="cpu")


def hf_config(**changes: Any) -> PretrainedConfig:
    fields = {
        "architectures": ["SDARForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "mask_token_id": 999,
        "block_size": 8,
    }
    config: Any = PretrainedConfig()
    config.model_type = "sdar"
    for name, value in (fields | changes).items():
        if value is not None:
            setattr(config, name, value)
    return config


def model(**changes: Any) -> Any:
    return ModelConfig.from_hf_config(hf_config(**changes), dtype="float32", device_type="cpu")


def test_the_configuration_says_mask_block_and_window():
    served = model()
    assert (served.dllm_mask_token, served.dllm_block_length) == (999, 8)
    assert (served.sliding_window, served.hf_config.sliding_window) == (-1, None)
    older = model(mask_token_id=None, block_size=None, vocab_size=151936)
    assert (older.dllm_mask_token, older.dllm_block_length) == (151669, 4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"mask_token_id": None}, "mask token 151669 outside the vocabulary of 1000"),
    ],
)
def test_configurations(changes, named):
    with pytest.raises(UnsupportedFeatureError, match=named):
        model(**changes)


def check(config: Any, speculates: bool = False, **options: Any) -> None:
    dllm = {name: options.pop(name, None) for name in ("block_length", "denoising_steps")}
    cache = {
        "block_size": 64,
        "max_prefill_token_num": 4096,
        "enable_prefix_caching": False,
        "quant_policy": 0,
    }
    misc = SimpleNamespace(dllm_config=DLLMConfig(**dllm))
    block_diffusion.check_options(config, SimpleNamespace(**{**cache, **options}), misc, speculates)


@pytest.mark.parametrize("options", [{}, {"block_length": 4}, {"block_length": 64}, {"denoising_steps": 2}])
def test_options_that_are_served(options):
    check(model(), **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_length": 1}, "dllm_block_length=1"),
        ({"block_length": 6}, "dllm_block_length=6"),
        ({"block_length": 128}, "dllm_block_length=128"),
        ({"max_prefill_token_num": 20}, r"dllm_block_length=8.* Next step: .*max_prefill_token_num=20"),
        ({"denoising_steps": 3}, "dllm_denoising_steps=3"),
        ({"denoising_steps": 0}, "dllm_denoising_steps=0"),
        ({"denoising_steps": 16}, "dllm_denoising_steps=16"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching"),
        ({"quant_policy": 8}, "quant_policy=8"),
        ({"speculates": True}, r"speculative decoding.* Next step: leave speculative_config out"),
    ],
)
def test_options_that_are_refused(options, named):
    with pytest.raises(UnsupportedFeatureError, match=named):
        check(model(), **options)


def test_other_devices(monkeypatch):
    served = model()
    monkeypatch.setattr(block_diffusion.devices, "shares_host", lambda device: False)
    with pytest.raises(UnsupportedFeatureError, match="block diffusion is not supported"):
        check(served)


def test_other_models_have_no_blocks():
    config: Any = Qwen3Config(architectures=["Qwen3ForCausalLM"], num_hidden_layers=1)
    plain = ModelConfig.from_hf_config(config, dtype="float32", device_type="cpu")
    check(plain, enable_prefix_caching=True, max_prefill_token_num=20)
    with pytest.raises(UnsupportedFeatureError, match=r"dllm_block_length=4.*leave dllm_block_length out"):
        check(plain, block_length=4)


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_drafts(method):
    dist = DistConfig()
    with pytest.raises(
        UnsupportedFeatureError, match="speculative decoding with a model that decodes by block"
    ):
        ModelConfig.from_hf_config(hf_config(), dtype="float32", dist_config=dist, spec_method=method)
    assert SpeculativeConfig(method=method)


def test_several_ranks():
    config = ConfigBuilder.build_dist_config(PytorchEngineConfig(device_type="cpu", tp=2))
    with pytest.raises(UnsupportedFeatureError, match="tp=2 of SDARForCausalLM"):
        ModelConfig.from_hf_config(hf_config(), dtype="float32", dist_config=config, device_type="cpu")


REQUESTS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.1, "do_sample": True},
    "repetition_ngram_size": {"repetition_ngram_size": 3, "repetition_ngram_threshold": 2},
    "logits_processors": {"logits_processors": [lambda tokens, logits: logits]},
    "bad_words": {"bad_words": ["no"]},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    },
    "logprobs": {"logprobs": 1},
    "output_logits": {"output_logits": "all", "max_new_tokens": 1},
    "max_new_tokens": {"max_new_tokens": 0},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_that_are_refused(name):
    reason = block_diffusion.refusal(GenerationConfig(**REQUESTS[name]))
    assert reason is not None
    assert f"{name}=" in reason and "Next step" in reason


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_of_openai(name):
    config = GenerationConfig()
    setattr(config, name, 0.5)
    reason = block_diffusion.refusal(config)
    assert reason is not None and name in reason


def test_requests_that_are_served():
    served: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.1},
        {"bad_token_ids": [3]},
        {"min_new_tokens": 2, "top_k": 5},
    ]
    for fields in served:
        assert block_diffusion.refusal(GenerationConfig(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "is_served"),
    [
        ({}, True),
        ({"bad_words": [3], "stop_words": [4], "min_new_tokens": 2}, True),
        ({"num_logprobs": 0}, False),
        ({"out_logits": True}, False),
        ({"out_ce_loss": True}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"max_new_tokens": 0}, False),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_what_reaches_the_engine(fields, is_served):
    assert block_diffusion.is_servable(SamplingParam(**fields)) is is_served
