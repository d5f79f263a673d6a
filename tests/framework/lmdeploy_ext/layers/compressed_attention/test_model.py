"""DeepSeek-V4's configuration, caches, weights and layers in LMDeploy, against transformers' modules."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from lmdeploy.messages import QuantPolicy
from lmdeploy.pytorch.backends.hc_prepost import HCPrePostBuildSpec
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.nn import RMSNorm, V4Compressor
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model.support import check_support
from dlinfer.framework.lmdeploy_ext.conversion.loading import rewrite
from dlinfer.framework.lmdeploy_ext.conversion.plan import plan_of
from dlinfer.framework.lmdeploy_ext.layers.compressed_attention import layers
from dlinfer.framework.lmdeploy_ext.layers.compressed_attention import model as compressed_model
from dlinfer.framework.lmdeploy_ext.layers.moe.mxfp4_experts import (
    FusedMoELimitedMxfp4,
    LimitedMxfp4Weights,
)
from dlinfer.framework.lmdeploy_ext.layers.quantised import kv_quantisation
from dlinfer.framework.lmdeploy_ext.preflight import model as preflight
from dlinfer.ops.moe.limited import limited
from examples.tiny_models.build import build
from examples.tiny_models.families import BRIEF
from tests.framework.lmdeploy_ext.conversion import conversion_files

FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODEL: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}


def config_of(**fields: Any) -> Any:
    given = BRIEF["deepseek_v4"].config | fields
    return transformers.DeepseekV4Config(**given, architectures=MODEL["architectures"])


@pytest.fixture
def on_cpu() -> None:
    from lmdeploy import PytorchEngineConfig

    PytorchEngineConfig(device_type="cpu")


def model_config(dtype: str = "float32", **fields: Any) -> Any:
    return ModelConfig.from_hf_config(config_of(**fields), dtype=dtype, device_type="cpu")


# --- configuration and caches


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_have_the_models_dtype_and_states_are_in_float32(dtype: str) -> None:
    config = model_config(dtype)
    found = {spec.name: (tuple(spec.shape), spec.dtype) for spec in config.state_cache_specs}
    assert found == {
        "v4_window_kv_fp8": ((16, 32), getattr(torch, dtype)),
        "v4_compress_state_r4": ((2, 8, 64), torch.float32),
        "v4_compress_state_r4_idx": ((2, 8, 32), torch.float32),
        "v4_compress_state_r128": ((2, 128, 32), torch.float32),
    }
    assert config.states_shapes == list(found.values())
    assert config.sliding_window == -1


YARN = BRIEF["deepseek_v4"].config["rope_parameters"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' of DeepSeek-V4"),
        ({"attention_bias": True}, "attention_bias=True of DeepSeek-V4"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False of DeepSeek-V4"),
        ({"mlp_bias": True}, "mlp_bias=True of deepseek_v4"),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, "a DeepSeek-V4 with these layers"),
        ({"n_shared_experts": 2}, "n_shared_experts=2 of DeepSeek-V4"),
        ({"swiglu_limit": 0.0}, "swiglu_limit=0.0 of DeepSeek-V4"),
        ({"layer_types": ["sliding_attention"] * 4}, "a DeepSeek-V4 without compressed layers"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type='default'"),
        ({"rope_parameters": YARN | {"attention_factor": 1.5}}, "attention_factor=1.5"),
    ],
)
def test_configurations_that_lmdeploy_computes_otherwise_are_refused(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=re.escape(words)):
        model_config(**fields)


@pytest.mark.usefixtures("on_cpu")
def test_what_was_never_compared_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match=re.escape("'ngram' with DeepseekV4ForCausalLM")):
        ModelConfig.from_hf_config(config_of(), device_type="cpu", spec_method="ngram", num_spec_tokens=3)
    with pytest.raises(UnsupportedFeatureError, match="tp=2 of DeepseekV4ForCausalLM"):
        ranks: Any = SimpleNamespace(tp=2)
        ModelConfig.from_hf_config(config_of(), device_type="cpu", dist_config=ranks)
    cache: Any = SimpleNamespace(quant_policy=QuantPolicy.INT8)
    with pytest.raises(UnsupportedFeatureError, match="quant_policy=8 with compressed attention"):
        kv_quantisation.check_model(model_config(), cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_and_entries_have_the_models_dtype(dtype: str, tmp_path: Path) -> None:
    """LMDeploy's have float16 for some norms, and FP8 for entries."""
    build("deepseek_v4", tmp_path / "model")
    built = preflight.build(tmp_path / "model", preflight.engine_config("cpu", dtype=dtype))
    wanted = getattr(torch, dtype)
    compressors: list[Any] = [one for one in built.module.modules() if isinstance(one, V4Compressor)]
    assert {one.weight.dtype for one in built.module.modules() if isinstance(one, RMSNorm)} == {wanted}
    assert len(compressors) == 5
    assert {one.impl.dtype for one in compressors} == {wanted}
    assert built.cache.block_size == 256
    assert built.block_bytes == (2 * 64 * (32 + 16) + 2 * 32) * wanted.itemsize


# --- weights


def test_names_that_transformers_gives_are_those_of_released_checkpoints() -> None:
    names = {
        "model.embed_tokens.weight": "embed.weight",
        "model.hc_head.hc_base": "hc_head_base",
        "model.layers.3.attn.norm.weight": "layers.3.attn.kv_norm.weight",
        "model.layers.3.attn.indexer.compressor.norm.weight": "layers.3.attn.indexer.compressor.norm.weight",
        "layers.0.attn.kv_norm.weight": "layers.0.attn.kv_norm.weight",
        "model.norm.weight": "norm.weight",
        "head.weight": "head.weight",
    }
    assert {stored: compressed_model._released_name(stored) for stored in names} == names


def fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return weight, torch.randint(120, 130, (-(-rows // 128), -(-columns // 128))).to(torch.uint8)


@pytest.mark.parametrize("scale_first", [False, True])
def test_fp8_becomes_floats_and_fp4_stays(scale_first: bool) -> None:
    torch.manual_seed(0)
    weight, codes = fp8(200, 150)
    scale = codes.view(torch.float8_e8m0fnu)
    plan = plan_of(FP8, MODEL | {"expert_dtype": "fp4"})
    assert plan is not None
    parts = [("layers.0.attn.wq_a.weight", weight), ("layers.0.attn.wq_a.scale", scale)]
    made = [pair for part in parts[:: -1 if scale_first else 1] for pair in plan.convert(*part, None)]
    ((name, floats),) = made
    assert name == "layers.0.attn.wq_a.weight"
    for row in range(200):
        for column in range(0, 150, 7):
            power = 2.0 ** (int(codes[row // 128, column // 128]) - 127)
            assert floats[row, column] == weight[row, column].float() * power
    packed = torch.zeros(4, 16, dtype=torch.int8)
    for given in (
        ("layers.0.ffn.experts.3.w1.weight", packed),
        ("layers.0.ffn.experts.3.w1.scale", scale),
        ("layers.0.attn_norm.weight", torch.ones(3)),
        ("layers.0.hc_attn_scale", torch.ones(3)),
    ):
        ((name, tensor),) = plan.convert(*given, None)
        assert name == given[0]
        assert tensor is given[1]


def test_experts_in_fp8_become_floats() -> None:
    weight, codes = fp8(8, 32)
    plan = plan_of(FP8, MODEL)
    assert plan is not None
    assert plan.experts == "floats"
    assert plan.convert("layers.0.ffn.experts.3.w1.weight", weight, None) == []
    scale = codes.view(torch.float8_e8m0fnu)
    ((_, floats),) = plan.convert("layers.0.ffn.experts.3.w1.scale", scale, None)
    assert torch.equal(floats, weight.float() * scale.float())


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (FP8 | {"fmt": "e5m2"}, "fp8 with fmt e5m2"),
        (FP8 | {"weight_block_size": [64, 64]}, "fp8 with weight_block_size [64, 64]"),
        ({"quant_method": "fp8"}, "fp8 with weight_block_size None"),
        (FP8 | {"expert_dtype": "int4"}, "fp8 with expert_dtype 'int4'"),
        ({"quant_method": "awq", "bits": 4}, "compared only with weights in DeepSeek's own FP8 and FP4"),
        ({"quant_method": "smooth_quant"}, "compared only with weights in DeepSeek's own FP8 and FP4"),
    ],
)
def test_other_quantisations_are_refused(stored: dict[str, Any], words: str) -> None:
    check_support(MODEL | {"quantization_config": FP8})
    with pytest.raises(UnsupportedFeatureError, match=re.escape(words)):
        check_support(MODEL | {"quantization_config": stored})


def test_scales_of_another_shape_are_refused() -> None:
    plan = plan_of(FP8, MODEL)
    assert plan is not None
    plan.convert("layers.0.attn.wkv.weight", fp8(8, 32)[0], None)
    with pytest.raises(UnsupportedFeatureError, match=r"wkv in FP8 with scales of shape \[8, 1\]"):
        plan.convert("layers.0.attn.wkv.scale", torch.ones(8, 1), None)


def test_lmdeploy_is_given_a_model_in_floats() -> None:
    for experts, packed_as in (("fp4", "mxfp4"), ("fp8", "floats")):
        model = MODEL | {"expert_dtype": experts}
        config = SimpleNamespace(quantization_config=FP8, to_dict=lambda model=model: model)
        rewrite(config)
        assert config.experts_packed_as == packed_as
        assert not hasattr(config, "quantization_config")


# --- layers


def test_experts_in_fp4_compute_what_their_numbers_mean() -> None:
    torch.manual_seed(0)
    hidden, inner, experts = 64, 96, 3
    parts = {
        "gate_up": LimitedMxfp4Weights(experts, hidden, (inner, inner), None),
        "down": LimitedMxfp4Weights(experts, inner, (hidden,), None),
    }
    floats: dict[str, list[Tensor]] = {}
    for shard, (part, out, into) in {
        "gate": ("gate_up", inner, hidden),
        "up": ("gate_up", inner, hidden),
        "down": ("down", hidden, inner),
    }.items():
        numbers, blocks, scales = conversion_files.mxfp4(torch.randn(experts, out, into))
        floats[shard] = list(numbers)
        owner: Any = parts[part]
        for expert in range(experts):
            packed = blocks[expert].flatten(-2).view(torch.int8)
            owner.load_weight(owner.weight, packed, expert, shard)
            owner.load_scale(owner.scale, scales[expert].view(torch.float8_e8m0fnu), expert, shard)
    x, ids, shares = torch.randn(5, hidden), torch.randint(experts, (5, 2)), torch.rand(5, 2)
    tensors = [getattr(part, name) for part in parts.values() for name in part.parts]
    got = FusedMoELimitedMxfp4(0.7).forward(x, shares, ids, *tensors)
    for token in range(5):
        expected = torch.zeros(hidden)
        for share, expert in zip(shares[token], ids[token].tolist(), strict=True):
            gate, up, down = (floats[shard][expert] for shard in ("gate", "up", "down"))
            expected += share * (down @ limited(gate @ x[token], up @ x[token], 0.7))
        torch.testing.assert_close(got[token], expected, rtol=1e-4, atol=1e-4)
    owner = parts["down"]
    with pytest.raises(UnsupportedFeatureError, match="a weight of experts in MXFP4 with"):
        owner.load_weight(owner.weight, torch.zeros(hidden, inner // 2), 0, "down")


@pytest.mark.usefixtures("on_cpu")
def test_the_limited_activation_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        experts: Any = hf.DeepseekV4Experts(config_of(swiglu_limit=0.8))
    both, unused = torch.randn(7, 24) * 2, lambda: None
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(limited(gate, up, 0.8), experts._apply_gate(both))
    assert torch.equal(compressed_model._swiglu.build(unused)(both, 0.8), limited(gate, up, 0.8))


def test_hyper_connections_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    config = config_of(hc_mult=3, hidden_size=8, hc_sinkhorn_iters=4)
    layer = hf.DeepseekV4HyperConnection(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    ours = layers.HyperConnections(HCPrePostBuildSpec(hc_mult=3, sinkhorn_iters=4, eps=config.hc_eps))
    streams, result = torch.randn(1, 9, 3, 8), torch.randn(1, 9, 8)
    with torch.no_grad():
        post, comb, collapsed = layer(streams)
        mixes = torch.nn.functional.linear(layer.input_norm(streams.flatten(2)), layer.fn)
        got = ours.pre(streams, mixes, layer.scale, layer.base, torch.float32)
    for own, expected in zip(got, (collapsed, post, comb), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    expanded = post[..., None] * result[..., None, :] + comb.transpose(-1, -2) @ streams
    torch.testing.assert_close(ours.post_expand(result, streams, post, comb), expanded)


def test_pairs_at_the_end_of_heads_are_turned_as_in_transformers() -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(5, 3, 12), torch.randn(5, 2)
    cos, sin = angles.cos(), angles.sin()
    expected = hf.apply_rotary_pos_emb(x, cos, sin)
    torch.testing.assert_close(layers.partial_rotary(x, cos, sin), expected)
    torch.testing.assert_close(layers.partial_rotary(expected, cos, -sin), x)
    norm = hf.DeepseekV4UnweightedRMSNorm(1e-6)
    torch.testing.assert_close(layers.unweighted_norm(x, 1e-6), norm(x))
