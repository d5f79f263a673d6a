"""Rotary tables of Phi-3.5-MoE and MiniCPM3 against transformers' modules of the same configuration."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.nn import rotary_embedding
from lmdeploy.pytorch.nn.rotary_embedding import get_rope_parameters, get_rope_theta
from torch import nn
from transformers import PhimoeConfig
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3RotaryEmbedding
from transformers.models.phimoe import modeling_phimoe

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import minicpm3 as minicpm3_faults
from dlinfer.framework.lmdeploy_ext.faults.models import rope_tables
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rope_parameters
from dlinfer.framework.lmdeploy_ext.layers.positions.rope_lengths import RopeLengths
from dlinfer.framework.lmdeploy_ext.running.backend import OpsBackend
from examples.hf_reference import choose_frequencies
from tests.framework.lmdeploy_ext.faults.models.rope_configs import (
    HEAD,
    MINICPM3,
    OF_CHECKPOINT,
    ORIGINAL,
    PHIMOE,
    ConfigOfACheckpoint,
    minicpm3,
    phimoe_as_released,
    phimoe_longrope,
)


@pytest.fixture(autouse=True)
def on_our_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")
    monkeypatch.setattr(rotary_embedding, "get_backend", lambda: OpsBackend)


def tables_of(config: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of a prompt, as LMDeploy's model gets them."""
    positions = torch.arange(length)
    if rope_parameters.original_length(config) is None:
        given = positions[None]
    else:
        given = rope_lengths.of_positions(positions, length)
    return rope_tables._tables(config, HEAD)(torch.zeros(1, length, 1), given)


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
    minicpm3_faults.check(config)
    expected = tables_of(minicpm3(**OF_CHECKPOINT), length)
    torch.testing.assert_close(tables_of(config, length), expected, rtol=0, atol=0)


def test_a_text_of_phimoe_that_outgrows_the_original_length_is_computed_anew() -> None:
    assert rope_lengths.of_model(phimoe_longrope()) == RopeLengths(ORIGINAL, computed_anew=True)
    assert rope_lengths.of_model(phimoe_as_released()) == RopeLengths(ORIGINAL, computed_anew=True)
    assert rope_lengths.of_model(minicpm3(**OF_CHECKPOINT)) == RopeLengths(ORIGINAL, computed_anew=False)


@pytest.mark.parametrize("made", [phimoe_longrope, MINICPM3["as released"]])
def test_the_class_sees_a_configuration_without_scaling(made: Any) -> None:
    seen: list[Any] = []
    patch = rope_tables._rotary("module:Class.__init__", "phimoe")
    build = patch.build(lambda self, config, *rest: seen.append(config))
    model, config = SimpleNamespace(), made()
    build(model, config)
    assert seen[0].hidden_size == config.hidden_size
    assert get_rope_parameters(seen[0]) is None
    assert get_rope_theta(seen[0]) == 10000
    assert isinstance(model.rotary_emb, nn.Module)
