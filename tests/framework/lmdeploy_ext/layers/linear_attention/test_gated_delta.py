"""Qwen3-Next's layers of gated linear attention: what LMDeploy's classes get, and what its configuration becomes."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta, gated_delta_model


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
