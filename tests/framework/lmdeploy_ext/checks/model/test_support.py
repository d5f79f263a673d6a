"""Which of LMDeploy's model classes are served: a row for each, so that a later release's classes are looked at."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lmdeploy.archs import check_vl_llm
from lmdeploy.pytorch.models.module_map import MODULE_MAP

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import check_model_folder
from dlinfer.framework.lmdeploy_ext.checks.model.quantisation import FLOATS_ALONE
from dlinfer.framework.lmdeploy_ext.checks.model.support import (
    _COMPARED_PACKED,
    NOT_SERVED,
    NOT_SERVED_VISION,
    SERVED_VISION,
    check_support,
    is_vision_language,
)
from dlinfer.framework.lmdeploy_ext.conversion.plan import plan_of
from dlinfer.framework.lmdeploy_ext.vision.parts import PARTS
from tests.framework.lmdeploy_ext.conversion.conversion_files import (
    INT4,
    INT8,
    INT8_INPUTS,
    KIMI_K25,
    compressed,
)
from tests.framework.lmdeploy_ext.nested import NESTED

SERVED = {
    "ChatGLMForConditionalGeneration",
    "DeepseekForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "HYV3ForCausalLM",
    "InternLM2ForCausalLM",
    "InternLM2ForRewardModel",
    "InternLM3ForCausalLM",
    "LlamaForCausalLM",
    "MiniCPM3ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "PhiMoEForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2ForRewardModel",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "SDARForCausalLM",
    "SDARMoeForCausalLM",
}


def test_every_class_of_lmdeploys_module_map_has_a_row():
    both = {"ChatGLMForConditionalGeneration"}  # with a part for vision and without
    rows = [SERVED, SERVED_VISION.keys() - both, set(NOT_SERVED), set(NOT_SERVED_VISION)]
    assert set(NESTED) <= set(NOT_SERVED_VISION)
    assert set().union(*rows) == set(MODULE_MAP)
    assert sum(map(len, rows)) == len(MODULE_MAP), "a class stands in two rows"


@pytest.mark.parametrize("name", sorted(SERVED))
def test_language_models_are_served(name: str):
    check_support({"architectures": [name], "model_type": "x", "text_config": {"vocab_size": 1}})
    check_support({"architectures": [name], "auto_map": {"AutoModelForCausalLM": f"modeling.{name}"}})
    assert not is_vision_language({"architectures": [name], "vocab_size": 1})


def nested(keys: str, inside: dict[str, Any]) -> dict[str, Any]:
    """A configuration with another one inside, behind keys with dots between them."""
    for key in reversed(keys.split(".")):
        inside = {key: inside}
    return inside


@pytest.mark.parametrize("name", sorted(name for name, inside in SERVED_VISION.items() if inside))
def test_vision_language_models_are_served_if_their_language_model_is(name: str):
    assert check_vl_llm("pytorch", {"architectures": [name]})
    whole, keys = {"architectures": [name]}, SERVED_VISION[name]
    check_support(whole | nested(keys, {"architectures": ["Qwen2ForCausalLM"]}))
    check_support(whole | nested(keys, {}) | {"vision_config": {}})
    with pytest.raises(UnsupportedFeatureError, match="MetaMoeForConditionalGeneration"):
        check_support(whole | nested(keys, {"architectures": ["MetaMoeForConditionalGeneration"]}))
    with pytest.raises(UnsupportedFeatureError, match="gptq"):
        check_support(whole | nested(keys, {"quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize("name", sorted(name for name, inside in SERVED_VISION.items() if not inside))
def test_models_of_one_configuration_are_served_unless_they_are_quantised(name: str):
    config = {"architectures": [name], "vision_config": {"image_size": 490}}
    check_support(config)
    with pytest.raises(UnsupportedFeatureError, match=rf"{name}.*quantised weights"):
        check_support(config | {"quantization_config": {"quant_method": "awq", "bits": 4}})


@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"])
def test_qwen3_5_is_served_in_awq_alone(name: str):
    text = {"hidden_size": 128, "linear_num_value_heads": 4, "linear_value_head_dim": 64}
    config = {"architectures": [name], "text_config": text, "vision_config": {}}
    check_support(config | {"quantization_config": AWQ})
    with pytest.raises(UnsupportedFeatureError, match=r"linear_num_value_heads . linear_value_head_dim=96"):
        check_support(
            config | {"text_config": text | {"linear_value_head_dim": 24}, "quantization_config": AWQ}
        )
    with pytest.raises(UnsupportedFeatureError, match=rf"{name}.*quantised as fp8 were never compared"):
        check_support(config | {"quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize("name", sorted(name for name, methods in _COMPARED_PACKED.items() if not methods))
def test_quantised_models_that_were_never_compared_are_refused(name: str):
    with pytest.raises(UnsupportedFeatureError, match=rf"{name}.*quantised as awq were never compared"):
        check_support({"architectures": [name]} | nested(SERVED_VISION[name], {"quantization_config": AWQ}))


def test_image_tokens_that_are_left_out_are_refused():
    config = {"architectures": ["InternVLChatModel"], "llm_config": {}}
    check_support(config)
    with pytest.raises(UnsupportedFeatureError, match="flash_mode"):
        check_support(config | {"flash_mode": True})


def test_fields_of_glm4v_where_transformers_does_not_read_them_are_refused():
    names = ["Glm4vForConditionalGeneration"]
    check_support({"architectures": names, "text_config": {"hidden_size": 64}})
    with pytest.raises(UnsupportedFeatureError, match=r"Glm4vForConditionalGeneration.*has no text_config"):
        check_support({"architectures": names, "hidden_size": 64})


def test_the_table_of_the_docs_names_every_served_model():
    page = (Path(__file__).parents[5] / "docs" / "guides" / "images.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == set(SERVED_VISION)


def test_graph_mode_knows_the_parts_of_every_served_model():
    assert set(PARTS) == {MODULE_MAP[name].rpartition(".")[2] for name in SERVED_VISION}


@pytest.mark.parametrize("name", sorted(NOT_SERVED_VISION.keys() - NESTED.keys()))
@pytest.mark.parametrize("mapped", [False, True], ids=["architectures", "auto_map"])
def test_vision_language_models_are_refused(name: str, mapped: bool):
    config: dict[str, Any] = {"architectures": [name]}
    assert check_vl_llm("pytorch", config), "LMDeploy itself takes it for a language model"
    if mapped:
        config = {"auto_map": {"AutoModelForCausalLM": f"modeling.{name}"}}
    with pytest.raises(UnsupportedFeatureError, match=f"vision-language model .*{name}") as caught:
        check_support(config)
    assert NOT_SERVED_VISION[name] in str(caught.value)
    assert "Next step:" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        *NESTED.values(),
        {"architectures": ["ChatGLMModel"], "vision_config": {"image_size": 1}},
        {"architectures": ["LlavaLlamaForCausalLM"]},
        {"architectures": ["SomethingNewForConditionalGeneration"], "vision_config": {"depth": 1}},
    ],
    ids=str,
)
def test_a_part_for_vision_tells_a_vision_language_model(config: dict[str, Any]):
    with pytest.raises(UnsupportedFeatureError, match="vision-language model"):
        check_support(config)


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_other_classes_are_refused_by_name_with_a_reason(name: str):
    with pytest.raises(UnsupportedFeatureError) as caught:
        check_support({"architectures": [name]})
    for words in (name, NOT_SERVED[name], "Next step:"):
        assert words in str(caught.value)


@pytest.mark.parametrize("inside", ["", "text_config", "llm_config"])
@pytest.mark.parametrize("method", ["gptq", "mxfp4", "fp8", "compressed-tensors"])
def test_quantised_weights_are_refused_by_their_method(method: str, inside: str):
    quantised = {"quantization_config": {"quant_method": method, "bits": 4}}
    config = {"architectures": ["LlamaForCausalLM"], **({inside: quantised} if inside else quantised)}
    with pytest.raises(UnsupportedFeatureError, match=method):
        check_support(config)


@pytest.mark.parametrize("name", sorted(FLOATS_ALONE))
@pytest.mark.parametrize("method", ["awq", "fp8", "smooth_quant"])
def test_quantised_weights_of_classes_that_are_served_in_floats_are_refused(name: str, method: str):
    config = {"architectures": [name], "quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(UnsupportedFeatureError, match=f"a quantised {name} .{method}; {FLOATS_ALONE[name]}"):
        check_support(config)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def kimi_k25(stored: dict[str, Any], **outside: Any) -> dict[str, Any]:
    """A configuration of Kimi-K2.5 whose language model is quantised."""
    text = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "kv_lora_rank": 32}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "vision_config": {"patch_size": 14},
        "text_config": text | {"n_routed_experts": 8, "quantization_config": stored},
        **outside,
    }


def test_packed_experts_of_kimi_k25_are_read_as_they_are_published():
    for config in (kimi_k25(KIMI_K25), kimi_k25(KIMI_K25, quantization_config=KIMI_K25)):
        check_support(config)
        assert plan_of(KIMI_K25, config) is None


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        (AWQ, "quantised as awq were never compared"),
        (compressed("int-quantized", INT8, INT8_INPUTS), "Only compressed-tensors `pack-quantized`"),
        (KIMI_K25 | {"quantization_status": "frozen"}, "must have `compressed` status"),
        (
            compressed("pack-quantized", INT4 | {"group_size": 64}, ignore=KIMI_K25["ignore"]),
            "`group_size`: expected 32, got 64",
        ),
        (KIMI_K25 | {"ignore": ["lm_head"]}, r"besides the experts \(self_attn.q_proj\)"),
        (KIMI_K25 | {"ignore": KIMI_K25["ignore"][:3]}, r"besides the experts \(mlp.gate_up_proj\)"),
        (KIMI_K25 | {"ignore": ["re:.*layers.1.*", *KIMI_K25["ignore"]]}, "experts of layer 1 in floats"),
    ],
)
def test_other_quantisation_of_kimi_k25_is_refused(stored: dict[str, Any], named: str):
    with pytest.raises(UnsupportedFeatureError, match=named) as caught:
        check_support(kimi_k25(stored))
    assert "Next step:" in str(caught.value)


@pytest.mark.parametrize("inside", ["", "text_config", "llm_config"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"version": "GEMM"}, {"modules_to_not_convert": ["lm_head"]}, {"modules_to_not_convert": None}],
    ids=str,
)
def test_awq_models_are_served(inside: str, fields: dict[str, Any]):
    quantised = {"quantization_config": AWQ | fields, "hidden_size": 896, "intermediate_size": 4864}
    check_support({"architectures": ["Qwen2ForCausalLM"], **({inside: quantised} if inside else quantised)})


@pytest.mark.parametrize(
    ("fields", "model", "named"),
    [
        ({"bits": 8}, {}, "of 8 bits"),
        ({"version": "gemv"}, {}, "layout 'gemv'"),
        ({"version": None, "format": "llm-awq"}, {}, "layout 'llm-awq'"),
        ({"group_size": -1}, {}, "group_size=-1"),
        ({"zero_point": False}, {}, "without zero points"),
        ({"modules_to_not_convert": ["lm_head", "mlp.gate"]}, {}, r"not packed \(mlp.gate\)"),
        ({}, {"num_local_experts": 8}, "with experts"),
        ({}, {"intermediate_size": 4800}, "intermediate_size=4800"),
        (
            {},
            {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 1},
            "num_key_value_heads . head_dim=64",
        ),
    ],
    ids=str,
)
def test_other_kinds_of_awq_are_refused_by_name(fields: dict[str, Any], model: dict[str, Any], named: str):
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": AWQ | fields} | model
    with pytest.raises(UnsupportedFeatureError, match=f"AWQ model .*{named}"):
        check_support(config)


def test_a_folder_is_refused_before_its_weights_are_looked_for(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MiniCPMV"]}))
    with pytest.raises(UnsupportedFeatureError, match="MiniCPMV"):
        check_model_folder(tmp_path)
