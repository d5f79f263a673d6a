"""Phi-3.5-MoE and MiniCPM3: what LMDeploy's classes get, against transformers' modules of the same configuration."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.models import phi3_moe
from lmdeploy.pytorch.nn import rotary_embedding
from lmdeploy.pytorch.nn.rotary_embedding import get_rope_parameters, get_rope_theta
from torch import nn
from transformers import MiniCPM3Config, PhimoeConfig, PretrainedConfig
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3RotaryEmbedding
from transformers.models.phimoe import modeling_phimoe

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import model_classes
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rope_parameters
from dlinfer.framework.lmdeploy_ext.layers.positions.rope_lengths import RopeLengths
from dlinfer.framework.lmdeploy_ext.running.backend import OpsBackend
from examples.hf_reference import choose_frequencies

ORIGINAL, HEAD = 64, 8
SIZES: dict[str, Any] = {
    "hidden_size": 4 * HEAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
LATENT: dict[str, Any] = {"qk_rope_head_dim": HEAD, "qk_nope_head_dim": 2 * HEAD}
LONGROPE: dict[str, Any] = {
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)],
    "long_factor": [1.0 + 2.0 * i for i in range(HEAD // 2)],
    "original_max_position_embeddings": ORIGINAL,
}
SCALES = {"short_mscale": 1.2, "long_mscale": 1.4}
OF_CHECKPOINT = {"rope_theta": 5e4, "rope_scaling": {"type": "longrope", **LONGROPE}}


@pytest.fixture(autouse=True)
def on_our_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")
    monkeypatch.setattr(rotary_embedding, "get_backend", lambda: OpsBackend)


def phimoe(**fields: Any) -> PhimoeConfig:
    return PhimoeConfig(**SIZES | fields)


def phimoe_longrope() -> PhimoeConfig:
    return phimoe(rope_parameters={"rope_type": "longrope", "rope_theta": 5e4, **LONGROPE, **SCALES})


def phimoe_as_released() -> PhimoeConfig:
    return phimoe(**OF_CHECKPOINT | {"rope_scaling": OF_CHECKPOINT["rope_scaling"] | SCALES})


def minicpm3(**fields: Any) -> MiniCPM3Config:
    return MiniCPM3Config(**SIZES | LATENT | fields)


class ConfigOfACheckpoint(PretrainedConfig):
    """As configurations that come as code are written: no field of transformers 5 for rope parameters."""

    model_type = "minicpm3"

    def __init__(self, rope_theta: float = 1e4, rope_scaling: Any = None, **fields: Any) -> None:
        for name, value in (SIZES | LATENT).items():
            setattr(self, name, value)
        self.q_lora_rank = 24
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        super().__init__(**fields)


PHIMOE = {
    "default": phimoe,
    "longrope": phimoe_longrope,
    "as released": phimoe_as_released,
}
MINICPM3 = {
    "default": minicpm3,
    "linear": lambda: minicpm3(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "as released": lambda: minicpm3(**OF_CHECKPOINT),
    "scale given": lambda: minicpm3(
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.3, **LONGROPE}
    ),
}


def tables_of(config: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of a prompt, as LMDeploy's model gets them."""
    positions = torch.arange(length)
    if rope_parameters.original_length(config) is None:
        given = positions[None]
    else:
        given = rope_lengths.of_positions(positions, length)
    return model_classes._tables(config, HEAD)(torch.zeros(1, length, 1), given)


def mended(config: PhimoeConfig) -> nn.Module:
    """transformers' tables, with the frequencies that it chooses."""
    rotary = modeling_phimoe.PhimoeRotaryEmbedding(config)
    choose_frequencies(SimpleNamespace(model=SimpleNamespace(rotary_emb=rotary)))
    return rotary


@pytest.mark.parametrize("length", [3, ORIGINAL, ORIGINAL + 1, 300])
@pytest.mark.parametrize("made", PHIMOE.values(), ids=PHIMOE)
def test_phimoe_has_transformers_tables(made: Any, length: int) -> None:
    config = made()
    expected = mended(config)(torch.zeros(1, length, 1), torch.arange(length)[None])
    torch.testing.assert_close(tables_of(config, length), expected, rtol=0, atol=2e-4)


def test_transformers_passes_over_the_long_factors() -> None:
    """Where this fails, transformers is mended, and ``hf_reference.choose_frequencies`` can go."""
    config = phimoe_longrope()
    theirs = modeling_phimoe.PhimoeRotaryEmbedding(config)
    for length, is_same in ((ORIGINAL, True), (ORIGINAL + 1, False)):
        given = torch.zeros(1, length, 1), torch.arange(length)[None]
        (cos, _), (right, _) = theirs(*given), mended(config)(*given)
        assert torch.equal(cos, right) == is_same


@pytest.mark.parametrize("length", [3, ORIGINAL, ORIGINAL + 1, 300])
@pytest.mark.parametrize("made", MINICPM3.values(), ids=MINICPM3)
def test_minicpm3_has_transformers_tables(made: Any, length: int) -> None:
    config = made()
    expected = MiniCPM3RotaryEmbedding(config)(torch.zeros(1, length, 1), torch.arange(length)[None])
    torch.testing.assert_close(tables_of(config, length), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("length", [ORIGINAL, 300])
def test_a_configuration_that_comes_as_code_is_read_alike(length: int) -> None:
    config = ConfigOfACheckpoint(**OF_CHECKPOINT)
    model_classes.check(config)
    expected = tables_of(minicpm3(**OF_CHECKPOINT), length)
    torch.testing.assert_close(tables_of(config, length), expected, rtol=0, atol=0)


def test_a_text_of_phimoe_that_outgrows_the_original_length_is_computed_anew() -> None:
    assert rope_lengths.of_model(phimoe_longrope()) == RopeLengths(ORIGINAL, computed_anew=True)
    assert rope_lengths.of_model(phimoe_as_released()) == RopeLengths(ORIGINAL, computed_anew=True)
    assert rope_lengths.of_model(minicpm3(**OF_CHECKPOINT)) == RopeLengths(ORIGINAL, computed_anew=False)


@pytest.mark.parametrize(("made", "rotated"), [(phimoe_longrope, HEAD), (MINICPM3["as released"], HEAD)])
def test_the_class_sees_a_configuration_without_scaling(made: Any, rotated: int) -> None:
    seen: list[Any] = []
    patch = model_classes._rotary("module:Class.__init__", "phimoe", lambda config: rotated)
    build = patch.build(lambda self, config, *rest: seen.append(config))
    model, config = SimpleNamespace(), made()
    build(model, config)
    assert seen[0].hidden_size == config.hidden_size
    assert get_rope_parameters(seen[0]) is None
    assert get_rope_theta(seen[0]) == 10000
    assert isinstance(model.rotary_emb, nn.Module)


@pytest.mark.parametrize("epsilon", [0.01, 0.2])
def test_lmdeploy_chooses_and_weighs_experts_as_transformers_does_when_it_does_not_train(
    epsilon: float,
) -> None:
    torch.manual_seed(0)
    scores = torch.randn(200, 8)
    ours = phi3_moe.sparsemixer(scores, top_k=2, jitter_eps=epsilon)
    torch.testing.assert_close(ours, modeling_phimoe.sparsemixer(scores, epsilon, training=False))


def made_by(patch: Any, *given: Any, **fields: Any) -> SimpleNamespace:
    """An object whose class has only this ``__init__``, which gives it these fields."""
    made = SimpleNamespace()
    patch.build(lambda self, *_: vars(self).update(fields))(made, *given)
    return made


def test_experts_get_their_input_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = (model_classes._without_jitter, None)
    assert made_by(*given, input_jitter_noise=0.01).input_jitter_noise == 0
    monkeypatch.setattr(activation, "_active", None)
    assert made_by(*given, input_jitter_noise=0.01).input_jitter_noise == 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_of_phimoe_is_the_embeddings(tied: bool) -> None:
    embeddings, head = nn.Embedding(5, 4), nn.Linear(4, 5)
    config = SimpleNamespace(tie_word_embeddings=tied)
    model = SimpleNamespace(embed_tokens=embeddings)
    made_by(model_classes._tied, config, None, model=model, lm_head=head)
    assert (head.weight is embeddings.weight) == tied


def test_attention_of_minicpm3_knows_the_sizes_of_its_heads() -> None:
    attention = SimpleNamespace(impl=SimpleNamespace(head_size=40, v_head_size=40))
    made_by(model_classes._head_sizes, None, attn_fwd=attention, q_head_dim=24)
    assert vars(attention.impl) == {"head_size": 24, "v_head_size": 24}


def test_minicpm3_makes_logits_of_the_tokens_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(hidden_size=8, dim_model_base=2)
    head = nn.Linear(8, 5, bias=False)
    made = made_by(model_classes._with_logits, config, None, config=config, lm_head=head)
    made.model = lambda ids, *rest: torch.ones(1, ids.shape[1], 8)
    forward = model_classes._hidden_states.build(lambda *_, **__: torch.zeros(1))
    step: Any = (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3), [])
    hidden = forward(made, *step, inputs_embeds=None)
    assert hidden.shape == (1, 3, 8)
    torch.testing.assert_close(made.get_logits(hidden[:, -1:]), head(torch.full((1, 1, 8), 0.25)))
    monkeypatch.setattr(activation, "_active", None)
    assert forward(made, *step).shape == (1,)
    assert not hasattr(made_by(model_classes._with_logits, config, None), "get_logits")


@pytest.mark.parametrize(
    "made", [*PHIMOE.values(), *MINICPM3.values(), lambda: SimpleNamespace(model_type="llama")]
)
def test_what_is_computed_alike_is_served(made: Any) -> None:
    model_classes.check(made())


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("phimoe", {"rope_parameters": {"rope_type": "yarn", **SCALES}}, "PhiMoE with rope type 'yarn'"),
        ("phimoe", {"rope_parameters": {"rope_type": "longrope", "short_mscale": 1.0}}, "no short_mscale or"),
        ("minicpm3", {"v_head_dim": 16}, "v_head_dim=16 in place of 8"),
        ("minicpm3", {"q_lora_rank": None}, "q_lora_rank=None"),
        ("minicpm3", {"mlp_bias": True}, "mlp_bias"),
        ("minicpm3", {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 0.7}}, "mscale_all_dim"),
    ],
    ids=str,
)
def test_what_is_not_is_refused_by_name(model_type: str, fields: dict[str, Any], named: str) -> None:
    config = SimpleNamespace(**{"model_type": model_type, "q_lora_rank": 24, **SIZES} | fields)
    with pytest.raises(UnsupportedFeatureError, match=named):
        model_classes.check(config)
