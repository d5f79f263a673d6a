"""Fields that transformers' classes read and LMDeploy's ignore: found by reading both, and each with an answer."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model import config_fields
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters

# model_type -> LMDeploy's files of its class.
CLASSES = {
    "llama": ("llama",),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "mistral": ("mistral",),
    "mixtral": ("mixtral",),
    "qwen2_moe": ("qwen2_moe",),
    "qwen3_moe": ("qwen3_moe",),
    "qwen3_next": ("qwen3_next",),
    "qwen3_5": ("qwen3_5",),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5"),
    "phi3": ("phi3",),
    "phimoe": ("phi3_moe",),
    "gemma": ("gemma",),
    "gemma2": ("gemma",),
    "glm4": ("glm4",),
    "glm4_moe": ("glm4_moe",),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v2",),
    "deepseek_v32": ("deepseek_v32", "deepseek_v2"),
    "glm_moe_dsa": ("glm_moe_dsa", "deepseek_v32", "deepseek_v2"),
    "glm4_moe_lite": ("deepseek_v2",),
    "deepseek_v4": ("deepseek_v4",),
    "gpt_oss": ("gpt_oss",),
}

ANSWERED = {
    "rope_parameters": "read by LMDeploy's rotary embedding and ours",
    "max_position_embeddings": "read by LMDeploy's rotary embedding and ours",
    "original_max_position_embeddings": "read by our rotary embedding",
    "layer_types": "read by our windows",
    "n_group": "read by our router of GLM-4-MoE",
    "topk_group": "read by our router of GLM-4-MoE",
    "swiglu_alpha": "checked with the experts of GPT-OSS",
    "swiglu_limit": "checked with the experts of GPT-OSS",
    "intermediate_size": "another name of a field that is read, in DeepSeek-V4",
    "compress_rates": "read by LMDeploy's configuration",
    "pad_token_id": "for training",
    "num_experts": "another name of a field that is read",
    "num_local_experts": "another name of a field that is read",
    "mlp_layer_types": "which tensors are stored follows from it, and those are checked",
    "attention_dropout": "for training",
    "resid_pdrop": "for training",
    "router_jitter_noise": "for training",
    "initializer_range": "for training",
    "output_router_logits": "for training",
    "router_aux_loss_coef": "for training",
    "use_cache": "how transformers runs it",
    "get_text_config": "a method",
    "image_token_id": "read by LMDeploy's input processor",
    "video_token_id": "videos are refused",
    "num_attention_heads": "read by LMDeploy's configuration",
}
"""Field -> why a class of LMDeploy's need not read it."""

LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def theirs(kind: str) -> str:
    return (folder("transformers") / f"models/{kind}/modeling_{kind}.py").read_text()


def checked(kind: str) -> set[str]:
    """The fields of a model type that our table has."""
    rows = {
        *config_fields._OTHER_ACTIVATIONS.get(kind, config_fields._ACTIVATION),
        *config_fields._FIELDS.get(kind, {}),
    }
    return rows | ({"head_dim"} if kind in config_fields._OWN_HEAD_DIM else set())


@pytest.mark.parametrize("kind", CLASSES)
def test_every_field_that_lmdeploy_ignores_has_an_answer(kind):
    read = set(re.findall(r"\bconfig\.([a-z]\w*)", theirs(kind)))
    models = folder("lmdeploy") / "pytorch/models"
    source = "".join((models / f"{name}.py").read_text() for name in CLASSES[kind])
    known = set(re.findall(r"\bconfig\.(\w+)", source)) | set(re.findall(r"['\"](\w+)['\"]", source))
    ignored = read - known - set(ANSWERED) - checked(kind)
    if kind in LATENT:
        ignored -= {"head_dim"}  # their heads have sizes of their own
    assert ignored == set()


@pytest.mark.parametrize("kind", CLASSES)
def test_which_classes_turn_whole_heads(kind):
    assert ("partial_rotary_factor" not in theirs(kind)) == (kind in rope_parameters.WHOLE_HEADS)


def config(kind: str, **fields: Any) -> Any:
    return SimpleNamespace(**{"model_type": kind, "hidden_size": 64, "num_attention_heads": 4, **fields})


@pytest.mark.parametrize(
    "served",
    [
        config("llama", hidden_act="silu"),
        config("internlm2", hidden_act="silu"),
        config("chatglm"),
        config("gemma", hidden_act="gelu_pytorch_tanh", hidden_activation=None),
        config("gemma2", hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=None),
        config("mixtral", hidden_act="silu", head_dim=None),
        config("mixtral", hidden_act="silu", head_dim=16),
        config("deepseek_v3", hidden_act="silu", rope_interleave=True),
        config("gpt_oss", hidden_act="anything"),
    ],
)
def test_served(served):
    config_fields.check(served)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (config("llama", hidden_act="gelu"), "hidden_act='gelu' of llama"),
        (config("internlm3", hidden_act="relu"), "hidden_act='relu' of internlm3"),
        (config("gemma", hidden_act="relu"), "hidden_act='relu' of gemma"),
        (config("gemma2", hidden_activation="silu"), "hidden_activation='silu' of gemma2"),
        (config("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (config("mixtral", hidden_act="silu", head_dim=32), "head_dim=32 of mixtral"),
        (config("deepseek_v3", hidden_act="silu", rope_interleave=False), "rope_interleave=False"),
        (config("deepseek_v2", hidden_act="silu", mlp_bias=True), "mlp_bias=True"),
        (config("qwen2_moe", hidden_act="silu", qkv_bias=False), "qkv_bias=False"),
    ],
)
def test_refused_by_name(refused, words):
    with pytest.raises(UnsupportedFeatureError, match="which LMDeploy ignores") as caught:
        config_fields.check(refused)
    assert words in str(caught.value)
