"""Rotary tables equal transformers' modules, for every rope type and on both sides of the original length."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.backends.rotary_embedding import RopeType, RotaryEmbeddingBuildSpec
from lmdeploy.pytorch.nn.rotary_embedding import build_rotary_params
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rope_parameters, rotary
from dlinfer.framework.lmdeploy_ext.running.backend import OpsBackend

ORIGINAL, LONGEST, HEAD = 64, 1024, 16

# One of each type, and variants of what a checkpoint may say or leave out.
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, factor given": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 0.7,
        "beta_fast": 8,
        "beta_slow": 2,
    },
    "yarn, scales of DeepSeek": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
    },
    "yarn, one scale only": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale_all_dim": 0.5,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": ORIGINAL,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)],
        "long_factor": [1.0 + 2.0 * i for i in range(HEAD // 2)],
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope, factor given": {
        "rope_type": "longrope",
        "short_factor": [1.0] * (HEAD // 2),
        "long_factor": [3.0] * (HEAD // 2),
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope, scale given": {
        "rope_type": "longrope",
        "short_factor": [1.0] * (HEAD // 2),
        "long_factor": [3.0] * (HEAD // 2),
        "attention_factor": 1.3,
        "original_max_position_embeddings": ORIGINAL,
    },
}


@pytest.fixture(autouse=True)
def on_our_device(monkeypatch):
    monkeypatch.setattr(activation, "_active", "cpu")


def config_of(parameters: dict[str, Any], **fields: Any) -> LlamaConfig:
    longest = ORIGINAL if parameters["rope_type"] == "dynamic" else LONGEST
    return LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": 10000.0, **parameters},
        **fields,
    )


def ours(config: PreTrainedConfig) -> torch.nn.Module:
    """As LMDeploy's model builds it, through our backend."""
    spec: dict[str, Any] = {
        "emb_type": RopeType.LinearScaling,
        "dim": HEAD,
        "max_position_embeddings": config.max_position_embeddings,
        "base": config.rope_parameters["rope_theta"],
    }
    spec.update(build_rotary_params(config))
    return OpsBackend.build_op(RotaryEmbeddingBuildSpec(**spec))


def positions_of(config: PreTrainedConfig, positions: torch.Tensor, prompt_length: int) -> torch.Tensor:
    if rope_parameters.original_length(config) is None:
        return positions[None]
    return rope_lengths.of_positions(positions, prompt_length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", [3, ORIGINAL, ORIGINAL + 1, 200, LONGEST])
@pytest.mark.parametrize("parameters", TYPES.values(), ids=TYPES)
def test_a_prompt_has_transformers_tables(parameters, length, dtype):
    config = config_of(parameters)
    positions = torch.arange(length)
    x = torch.zeros(1, length, 1, dtype=dtype)
    cos, sin = ours(config)(x, positions_of(config, positions, length))
    expected = LlamaRotaryEmbedding(config)(x, positions[None])
    assert cos.dtype == sin.dtype == dtype
    # Angles of one rounding more or less, where float32 products come in another order.
    tolerance = 1e-6 * length if dtype != torch.bfloat16 else 8e-3
    torch.testing.assert_close(cos, expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(sin, expected[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("parameters", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("prompt", [3, 60, 70])
def test_later_tokens_have_those_of_transformers_with_a_cache(parameters, prompt):
    config = config_of(parameters)
    table, reference = ours(config), LlamaRotaryEmbedding(config)
    x = torch.zeros(1, 1, 1)
    reference(x, torch.arange(prompt)[None])
    for position in range(prompt, prompt + 20):
        given = torch.tensor([position])
        cos, sin = table(x, positions_of(config, given, prompt))
        expected = reference(x, given[None])
        torch.testing.assert_close(cos, expected[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(sin, expected[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("parameters", [TYPES["dynamic"], TYPES["longrope"]], ids=["dynamic", "longrope"])
def test_neighbours_in_a_batch_do_not_change_a_prompt(parameters):
    config = config_of(parameters)
    table = ours(config)
    prompts = [positions_of(config, torch.arange(length), length) for length in (3, 200, 70)]
    x = torch.zeros(1, 1, 1)
    together, _ = table(x, torch.cat(prompts, dim=1))
    alone = torch.cat([table(x, prompt)[0] for prompt in prompts], dim=1)
    # Vectorised powers differ in their last bit from those at the end of an array.
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


def test_types_can_be_told_apart():
    """A length or a type taken for another would show in these tests."""
    x, positions = torch.zeros(1, 1, 1), torch.arange(200)
    one_of_each = [given for name, given in TYPES.items() if "," not in name]
    tables = [
        ours(config_of(given))(x, positions_of(config_of(given), positions, 200))[0] for given in one_of_each
    ]
    for one, other in itertools.combinations(tables, 2):
        assert (one - other).abs().max() > 1e-2


def test_a_type_that_is_unknown_is_refused():
    spec = RotaryEmbeddingBuildSpec(dim=HEAD, emb_type=RopeType.Fope)
    with pytest.raises(UnsupportedFeatureError, match="Fope"):
        rotary.from_spec(spec)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rope_type": "axial"}, "'axial'"),
        ({"type": "proportional"}, "'proportional'"),
        ({"rope_type": "default", "fope_sep_head": True}, "fope"),
        ({"rope_type": "dynamic", "factor": 2.0, "mrope_section": [2, 3, 3]}, "mrope_section"),
        ({"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}, "full_attention"),
    ],
)
def test_parameters_that_are_not_served_are_refused_by_name(given, named):
    config = SimpleNamespace(rope_parameters=given, model_type="gemma3_text")
    with pytest.raises(UnsupportedFeatureError, match=named):
        rope_parameters.check(config)


@pytest.mark.parametrize("inplace", [True, False])
def test_tables_narrower_than_a_head_leave_the_rest_of_it(inplace):
    torch.manual_seed(0)
    query, key = torch.randn(5, 4, HEAD), torch.randn(5, 2, HEAD)
    angles = torch.randn(5, HEAD // 4)
    cos, sin = (f(torch.cat((angles, angles), dim=-1)) for f in (torch.cos, torch.sin))
    rotated = rotary.ApplyRotary().forward(query.clone(), key.clone(), cos, sin, inplace)
    for x, y in zip((query, key), rotated, strict=True):
        first, second = x[..., : HEAD // 4], x[..., HEAD // 4 : HEAD // 2]
        c, s = cos[:, None, : HEAD // 4], sin[:, None, : HEAD // 4]
        expected = torch.cat((first * c - second * s, second * c + first * s, x[..., HEAD // 2 :]), dim=-1)
        torch.testing.assert_close(y, expected)
