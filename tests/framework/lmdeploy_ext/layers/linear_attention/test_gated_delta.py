"""Layers of gated linear attention: what LMDeploy's classes get, and what their configurations become."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta, gated_delta_model
from examples.tiny_models.build import build as build_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = Qwen3NextRMSNormGated(24, eps=1e-6).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    ours = gated_delta.GatedRMSNorm(24, 1e-6, activation="silu", dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x, gate = torch.randn(9, 24).to(dtype), torch.randn(9, 24).to(dtype)
    # In bfloat16 a sum in another order may turn the normalised value by one of its steps of 2**-8.
    relative = 2e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(ours(x, gate), theirs(x, gate), rtol=relative, atol=1e-6)


def test_other_activations_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="activation 'gelu'"):
        gated_delta.GatedRMSNorm(8, 1e-6, activation="gelu")
    meta = SimpleNamespace(state_ids=None, q_ends=None, fresh=None)
    with pytest.raises(UnsupportedFeatureError, match="activation 'gelu'"):
        gated_delta.Convolution().forward(
            torch.zeros(1, 2, 4), torch.zeros(4, 1, 3), None, torch.zeros(1, 4, 3), meta, "gelu"
        )


def test_states_are_kept_as_transformers_computes_them() -> None:
    shapes = [((3, 96, 4), torch.bfloat16), ((3, 4, 24, 16), torch.bfloat16)]
    config = SimpleNamespace(is_gated_delta=True, states_shapes=shapes, dtype=torch.float16)
    gated_delta_model.check(config)
    assert config.states_shapes == [((3, 96, 4), torch.float16), ((3, 4, 24, 16), torch.float32)]
    shapes = [((3, 96, 6), torch.bfloat16), ((3, 3, 4, 24, 16), torch.bfloat16)]  # with two drafts
    config.states_shapes = shapes
    gated_delta_model.check(config)
    assert [shape for shape, _ in config.states_shapes] == [(3, 3, 96, 4), (3, 3, 4, 24, 16)]
    other = SimpleNamespace(states_shapes=[], dtype=torch.float16)
    gated_delta_model.check(other)
    assert other.states_shapes == []


@pytest.mark.parametrize(
    ("types", "attention", "linear"),
    [("llfl", 1, 3), ("lfllflf", 3, 4), ("fl", 1, 1)],
    ids=["an interval cut short", "no interval", "attention first"],
)
def test_layers_are_counted_by_their_types(
    monkeypatch: pytest.MonkeyPatch, types: str, attention: int, linear: int
) -> None:
    """transformers 5 drops full_attention_interval, and checkpoints need not have one."""
    from lmdeploy.pytorch.configurations.qwen3_next import Qwen3NextModelConfigBuilder

    monkeypatch.setattr(gated_delta_model.activation, "_active", "cpu")
    names = {"l": "linear_attention", "f": "full_attention"}
    config = Qwen3NextConfig(
        num_hidden_layers=len(types),
        layer_types=[names[one] for one in types],
        bos_token_id=1,
        eos_token_id=2,
    )
    assert not hasattr(config, "full_attention_interval")
    build = gated_delta_model._build_config.build(Qwen3NextModelConfigBuilder.build.__func__)
    built = build(Qwen3NextModelConfigBuilder, config)
    assert built.num_layers == attention
    assert [shape[0] for shape, _ in built.states_shapes] == [linear, linear]
    with pytest.raises(UnsupportedFeatureError, match="only one type of layers"):
        build(Qwen3NextModelConfigBuilder, Qwen3NextConfig(num_hidden_layers=2, layer_types=[names["l"]] * 2))


def qwen3_5(**text: Any) -> Any:
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return Qwen3_5Config(text_config={"num_hidden_layers": 4, **ends, **text}, dtype="float32")


def build_qwen3_5(monkeypatch: pytest.MonkeyPatch, config: Any) -> Any:
    from lmdeploy.pytorch.configurations.qwen3_5 import Qwen3_5ModelConfigBuilder

    monkeypatch.setattr(gated_delta_model.activation, "_active", "cpu")
    build = gated_delta_model._build_config_3_5.build(Qwen3_5ModelConfigBuilder.build.__func__)
    return build(Qwen3_5ModelConfigBuilder, config)


def test_qwen3_5_has_what_transformers_takes_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = qwen3_5(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    text = config.text_config
    assert not hasattr(text, "attn_output_gate")
    assert text.dtype is None
    build_qwen3_5(monkeypatch, config)
    assert text.attn_output_gate
    assert text.dtype == torch.float32
    assert text.rope_parameters["mrope_section"] == [11, 11, 10]
    assert text.rope_parameters["mrope_interleaved"]
    assert text.rope_parameters["rope_theta"] == 1e6


def test_axes_of_qwen3_5_are_those_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": False}
    config = qwen3_5(rope_parameters=rope)
    build_qwen3_5(monkeypatch, config)
    assert config.text_config.rope_parameters["mrope_section"] == [4, 2, 2]
    assert config.text_config.rope_parameters["mrope_interleaved"], "transformers reads no such field"


@pytest.mark.parametrize("only", ["linear_attention", "full_attention"])
def test_qwen3_5_with_layers_of_one_type_is_refused(monkeypatch: pytest.MonkeyPatch, only: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"Qwen3.5 with only one type of layers"):
        build_qwen3_5(monkeypatch, qwen3_5(layer_types=[only] * 4))


def test_a_tiny_models_states_last(tmp_path: Path) -> None:
    """A test of tokens would miss a lost state if states were forgotten within a few tokens anyway."""
    build_model("qwen3_5", tmp_path / "model", seed=3)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "model").eval()
    for layer in model.model.language_model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.o_proj.weight.data.zero_()
    text = torch.arange(100, 140)[None]
    other = text.clone()
    other[0, :10] += 300
    with torch.inference_mode():
        difference = (model(text).logits - model(other).logits)[0, -1].abs().max()
    assert difference > 0.5, "30 tokens later nothing is left"
