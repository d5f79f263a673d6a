"""What is not served is refused by name, in the user's process, before any weight is read."""

import asyncio
import inspect
import re
from typing import Any

import pytest
import torch
import transformers
from lmdeploy import PytorchEngineConfig
from lmdeploy.messages import SpeculativeConfig
from lmdeploy.pytorch.backends import get_backend
from lmdeploy.pytorch.backends.awq_modules import LinearW4A16BuildSpec
from lmdeploy.pytorch.backends.moe import FusedMoEV4FP4BuildSpec
from lmdeploy.pytorch.config import (
    DistConfig,
    ModelConfig,
    QuantizationConfig,
    _patch_quantization_config,
)
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from lmdeploy.pytorch.engine.engine import Engine as PytorchEngine
from lmdeploy.pytorch.engine.mp_engine.base import MPEngine
from lmdeploy.serve.core import AsyncEngine

from dlinfer import settings
from dlinfer.errors import DeviceConflictError, UnknownVendorError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from tests.framework.lmdeploy_ext.layers.attention_specs import paged_spec


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"tp": 16}, "tp=16"),
        ({"dp": 2, "tp": 1}, "dp=2"),
        ({"ep": 2}, "ep=2"),
        ({"quant_policy": 42}, "quant_policy=42 (TURBO_QUANT)"),
        ({"enable_microbatch": True}, "enable_microbatch"),
        ({"model_format": "fp8"}, "model_format='fp8'"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend='ray'"),
        ({"hf_overrides": {"memory_model_path": "memory"}}, "MemDecode"),
    ],
)
def test_options_of_the_engine(option, named):
    with pytest.raises(UnsupportedFeatureError) as caught:
        PytorchEngineConfig(device_type="cpu", **option)
    assert named in str(caught.value)
    assert "Next step:" in str(caught.value)


def test_an_option_set_later_is_refused_when_the_engine_starts():
    config = PytorchEngineConfig(device_type="cpu")
    config.tp = 16
    with pytest.raises(UnsupportedFeatureError, match="tp=16"):
        ConfigBuilder.update_engine_config(config)


@pytest.mark.parametrize(
    ("asked", "engine", "words"),
    [
        ({"method": "dflash", "model": "path"}, {}, r"speculative decoding \(method 'dflash'\).*eagle3"),
        ({"method": "eagle3"}, {}, r"'eagle3'\) without a draft model"),
        ({"method": "eagle", "model": "path", "num_speculative_tokens": 0}, {}, "num_speculative_tokens=0"),
        ({"method": "deepseek_mtp"}, {"adapters": {"a": "hub/a"}}, "with LoRA adapters"),
        ({"method": "qwen3_5_mtp", "model": "path"}, {}, "'qwen3_5_mtp' with model='path'.*leave model out"),
        ({"method": "qwen3_5_mtp"}, {"enable_prefix_caching": True}, "with enable_prefix_caching"),
        ({"method": "qwen3_5_mtp"}, {"language_model_only": True}, "with language_model_only"),
        ({"method": "qwen3_5_mtp"}, {"quant_policy": 8}, "'qwen3_5_mtp' with quant_policy=8"),
        ({"method": "qwen3_5_mtp"}, {"adapters": {"a": "hub/a"}}, "with LoRA adapters"),
        ({"method": "ngram", "model": "path"}, {}, "'ngram' with model='path'.*leave model out"),
        ({"method": "ngram", "num_speculative_tokens": -1}, {}, "num_speculative_tokens=-1.*use 1 or more"),
    ],
    ids=str,
)
def test_speculative_decoding(asked, engine, words):
    config = PytorchEngineConfig(device_type="cpu", max_batch_size=4, **engine)
    speculative = SpeculativeConfig(**asked)
    with pytest.raises(UnsupportedFeatureError, match=words):
        ConfigBuilder.build_specdecode_config(
            "path", speculative, config, ConfigBuilder.build_cache_config(config), DistConfig()
        )


TARGETS_AND_DRAFTS = {
    "a target of another class": ("Qwen2", {}, "eagle", False, "'eagle' with Qwen2ForCausalLM"),
    "too few layers": (
        "Llama",
        {"num_hidden_layers": 6},
        "eagle3",
        False,
        "'eagle3' with a target of 6 layers",
    ),
    "dynamic frequencies": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "eagle",
        False,
        "rope type 'dynamic'",
    ),
    "a draft of another class": ("Qwen2", {}, "eagle3", True, "a draft of Qwen2ForCausalLM for 'eagle3'"),
    "a draft of EAGLE": ("Llama", {}, "eagle3", True, "without draft_vocab_size"),
    "no MTP layers": ("DeepseekV2", {}, "deepseek_mtp", True, "without num_nextn_predict_layers"),
    "sparse attention": (
        "DeepseekV32",
        {},
        "deepseek_mtp",
        False,
        "'deepseek_mtp' with DeepseekV32ForCausalLM",
    ),
    "no MTP layers of Qwen3.5": ("Qwen3_5", {}, "qwen3_5_mtp", True, "without mtp_num_hidden_layers"),
    "two MTP layers": (
        "Qwen3_5",
        {"text_config": {"mtp_num_hidden_layers": 2}},
        "qwen3_5_mtp",
        True,
        "'qwen3_5_mtp' with mtp_num_hidden_layers = 2",
    ),
    "no Qwen3.5": ("Qwen3Next", {}, "qwen3_5_mtp", False, "'qwen3_5_mtp' with Qwen3NextForCausalLM"),
    "a quantised target": (
        "Qwen3_5",
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
        "qwen3_5_mtp",
        False,
        "'qwen3_5_mtp' with a quantised checkpoint",
    ),
    "no DeepSeek": ("Llama", {}, "deepseek_mtp", False, "'deepseek_mtp' with LlamaForCausalLM"),
}


@pytest.mark.parametrize("name", TARGETS_AND_DRAFTS)
def test_targets_and_drafts_are_refused_while_their_configuration_is_read(name):
    family, fields, method, is_draft, words = TARGETS_AND_DRAFTS[name]
    PytorchEngineConfig(device_type="cpu")
    kind = "ConditionalGeneration" if family == "Qwen3_5" else "CausalLM"
    hf_config = getattr(transformers, f"{family}Config")(architectures=[f"{family}For{kind}"], **fields)
    with pytest.raises(UnsupportedFeatureError, match=re.escape(words)):
        ModelConfig.from_hf_config(hf_config, device_type="cpu", spec_method=method, is_draft_model=is_draft)


def test_a_draft_is_served_as_one_alone():
    PytorchEngineConfig(device_type="cpu")
    fields: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 8}
    draft = transformers.LlamaConfig(num_hidden_layers=1, **fields)
    config = ModelConfig.from_hf_config(draft, device_type="cpu", spec_method="eagle3", is_draft_model=True)
    assert config.hf_config.architectures == ["Eagle3LlamaForCausalLM"]
    with pytest.raises(UnsupportedFeatureError, match="it only drafts tokens for speculative decoding"):
        ModelConfig.from_hf_config(config.hf_config, device_type="cpu")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cpu_weights": "int8"}, "DLINFER_CPU_WEIGHTS=int8"),
        ({"cpu_weights": "int4"}, "DLINFER_CPU_WEIGHTS=int4"),
        ({"engine": "openvino"}, "DLINFER_ENGINE=openvino"),
    ],
    ids=str,
)
def test_settings_that_are_refused_beside_drafts_of_qwen3_5(changes, named):
    config, asked = PytorchEngineConfig(device_type="cpu"), SpeculativeConfig(method="qwen3_5_mtp")
    caches = ConfigBuilder.build_cache_config(config)
    words = f"'qwen3_5_mtp' with {named}"
    with settings.override(**changes), pytest.raises(UnsupportedFeatureError, match=words):
        ConfigBuilder.build_specdecode_config("path", asked, config, caches, DistConfig())


def test_the_mtp_layer_of_qwen3_5_drafts_for_a_target_with_states():
    """The draft has a cache of one layer and no states, and the target one state more than drafts."""
    PytorchEngineConfig(device_type="cpu")
    names, text = ["Qwen3_5ForConditionalGeneration"], {"num_hidden_layers": 4, "mtp_num_hidden_layers": 1}
    made: dict[str, Any] = {"device_type": "cpu", "spec_method": "qwen3_5_mtp"}

    def config() -> Any:
        return transformers.Qwen3_5Config(architectures=list(names), text_config=text, dtype="float32")

    target = ModelConfig.from_hf_config(config(), num_spec_tokens=2, **made)
    (convolution, _), (rule, _) = target.states_shapes
    assert (convolution[:2], rule[:2]) == ((3, 3), (3, 3))
    assert convolution[-1] == target.hf_config.text_config.linear_conv_kernel_dim
    draft = ModelConfig.from_hf_config(config(), is_draft_model=True, **made)
    assert draft.hf_config.architectures == ["Qwen3_5MTPModel"]
    assert (draft.num_layers, draft.states_shapes) == (1, [])
    with pytest.raises(UnsupportedFeatureError, match="Qwen3_5MTPModel"):
        ModelConfig.from_hf_config(draft.hf_config, device_type="cpu")


def test_an_unknown_device_type_names_the_available_ones():
    with pytest.raises(UnknownVendorError, match=r"'tpu'.*Available: cpu, cuda\."):
        PytorchEngineConfig(device_type="tpu")


class Engine:
    """Stands for an engine that may not be put to sleep: asking anything of it is an AttributeError."""


@pytest.mark.parametrize("owner", [AsyncEngine, PytorchEngine])
@pytest.mark.parametrize("level", [2, 0, None])
def test_a_sleep_that_loses_the_weights_is_refused_before_anything_changes(owner, level):
    PytorchEngineConfig(device_type="cpu")
    with pytest.raises(UnsupportedFeatureError, match=rf"sleep\(level={level}\).*level 1"):
        asyncio.run(owner.sleep(Engine(), level))
    with pytest.raises(AttributeError):  # level 1 is LMDeploy's own business
        asyncio.run(owner.sleep(Engine(), 1))


@pytest.mark.parametrize(
    ("owner", "name"), [(AsyncEngine, "backend_config"), (PytorchEngine, "engine_config")]
)
def test_a_sleep_of_several_processes_is_refused(owner, name):
    """LMDeploy 0.18: requests after waking up may wait forever."""
    engine: Any = Engine()
    setattr(engine, name, PytorchEngineConfig(device_type="cpu", tp=2))
    with pytest.raises(UnsupportedFeatureError, match=r"sleep with tp=2.*end the engine"):
        asyncio.run(owner.sleep(engine, 1))


@pytest.mark.parametrize("owner", [PytorchEngine, MPEngine])
@pytest.mark.parametrize(
    "name",
    [
        "update_params",
        "init_weights_update_group",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "destroy_weights_update_group",
    ],
)
def test_new_weights_for_a_running_engine_are_refused_by_name(owner, name, monkeypatch):
    PytorchEngineConfig(device_type="cpu")
    update = getattr(owner, name)

    def run():
        found = update(Engine(), None)
        asyncio.run(found) if inspect.iscoroutine(found) else None

    with pytest.raises(
        UnsupportedFeatureError, match=rf"{name}.*'cpu'.* Next step: save the new weights as a model folder"
    ):
        run()
    monkeypatch.setattr(activation, "_active", None)
    with pytest.raises(AttributeError):  # other devices are LMDeploy's own business
        run()


def test_lmdeploys_own_checks_still_run():
    with pytest.raises(AssertionError, match="kernel_block_size must be >= 16"):
        PytorchEngineConfig(device_type="cpu", block_size=8)
    with pytest.raises(AssertionError):
        PytorchEngineConfig(device_type="cpu", dtype="int8")


def test_a_second_device_in_the_same_process_is_refused():
    PytorchEngineConfig(device_type="cpu")
    cuda = PytorchEngineConfig(device_type="cuda", max_batch_size=1)
    with pytest.raises(DeviceConflictError, match=r"'cpu'.*'cuda'"):
        ConfigBuilder.update_engine_config(cuda)


@pytest.mark.parametrize(
    "change",
    [
        {"use_flash_mla": True},
        {"mla_index_topk": 8},
        {"causal": False},
        {"block_sparse_size": 4, "alibi": True},
    ],
    ids=str,
)
def test_attention_that_no_op_serves(change):
    with pytest.raises(UnsupportedFeatureError):
        get_backend("cpu").build_op(paged_spec(**change))


def test_a_layer_that_no_op_serves_is_named():
    spec = FusedMoEV4FP4BuildSpec.__new__(FusedMoEV4FP4BuildSpec)
    with pytest.raises(UnsupportedFeatureError, match="FusedMoEV4FP4BuildSpec"):
        get_backend("cpu").build_op(spec)


PHIMOE_LINEAR = {
    "rope_type": "linear",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_mscale": 1.0,
    "long_mscale": 1.0,
    "original_max_position_embeddings": 4096,
}

REFUSED_MODELS = {
    "gpt-oss with another activation": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"swiglu_limit": 3.0, "torch_dtype": "float32"},
        "swiglu_limit=3.0",
    ),
    "Phi-3.5-MoE without longrope": (
        "PhimoeConfig",
        "PhiMoEForCausalLM",
        {"rope_parameters": PHIMOE_LINEAR},
        "PhiMoE with rope type 'linear'",
    ),
    "MiniCPM3 with other values": (
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        {"v_head_dim": 128},
        "MiniCPM3 with v_head_dim=128",
    ),
    "GPTQ": ("LlamaConfig", "LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    "MXFP4": ("Qwen2Config", "Qwen2ForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    "AWQ of 8 bits": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"quantization_config": {"quant_method": "awq", "bits": 8}},
        "AWQ model of 8 bits",
    ),
    "an unknown rope type": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}},
        "rope type 'proportional'",
    ),
    "chunked layers": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
        "chunked_attention",
    ),
}


@pytest.mark.parametrize(
    ("config", "architecture", "fields", "named"), REFUSED_MODELS.values(), ids=REFUSED_MODELS
)
def test_models_are_refused_while_their_configuration_is_read(config, architecture, fields, named):
    PytorchEngineConfig(device_type="cpu")
    hf_config = getattr(transformers, config)(architectures=[architecture], **fields)
    with pytest.raises(UnsupportedFeatureError, match=named):
        ModelConfig.from_hf_config(hf_config, device_type="cpu")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("model_format", [None, "awq"])
def test_an_awq_model_is_served_in_the_dtype_that_is_asked_for(dtype, model_format):
    PytorchEngineConfig(device_type="cpu", dtype=dtype, model_format=model_format)
    fields: dict[str, Any] = {"quantization_config": AWQ, "architectures": ["LlamaForCausalLM"]}
    hf_config = transformers.LlamaConfig(intermediate_size=128, **fields)
    config = _patch_quantization_config(hf_config, model_format)
    found = ModelConfig.from_hf_config(config, dtype=dtype, device_type="cpu")
    assert found.dtype is (torch.float16 if dtype == "auto" else getattr(torch, dtype))
    assert QuantizationConfig.from_config(config).group_size == 64


@pytest.mark.parametrize("name", ["awq", "gptq", "compressed-tensors", "mxfp4"])
def test_the_format_of_a_model_that_has_another(name):
    PytorchEngineConfig(device_type="cpu", model_format=name)
    with pytest.raises(
        UnsupportedFeatureError, match=f"model_format='{name}' for a model that is not quantised"
    ):
        _patch_quantization_config(transformers.LlamaConfig(), name)


def test_a_weight_of_other_bits_is_refused_as_its_layer_is_built():
    spec = LinearW4A16BuildSpec(64, 64, w_bit=3, group_size=32, bias=False, output_dtype=torch.float16)
    with pytest.raises(UnsupportedFeatureError, match="AWQ weights of 3 bits"):
        get_backend("cpu").build_op(spec)
