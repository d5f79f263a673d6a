"""Which quantised checkpoints are taken and which are refused, and the layers that LMDeploy builds of those taken."""

import dataclasses
from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.backends import get_backend
from lmdeploy.pytorch.backends.blockedf8_modules import LinearBlockedF8BuildSpec
from lmdeploy.pytorch.backends.moe import (
    FusedMoEBlockedF8BuildSpec,
    FusedMoEStaticF8BuildSpec,
    FusedMoEW8A8BuildSpec,
)
from lmdeploy.pytorch.backends.qmodules import LinearW8A8BuildSpec, RMSNormW8A8BuildSpec
from lmdeploy.pytorch.backends.static_fp8_modules import LinearStaticF8BuildSpec
from lmdeploy.pytorch.models.q_modules import QTensor

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model.quantisation import W8A8_SERVED
from dlinfer.framework.lmdeploy_ext.checks.model.support import check_support

BLOCKED: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
W8A8: dict[str, Any] = {"quant_method": "smooth_quant"}
AWQ: dict[str, Any] = {"quant_method": "awq", "zero_point": True, "version": "GEMM"}


def config(quantised: dict[str, Any], name: str = "LlamaForCausalLM", **sizes: int) -> dict[str, Any]:
    return {"architectures": [name], "quantization_config": quantised, **sizes}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (config(W8A8 | {"quant_dtype": "float8_e5m2"}), "float8_e5m2"),
        (config(W8A8, "Qwen3MoeForCausalLM"), "Qwen3MoeForCausalLM"),
        (config(W8A8, "DeepseekV2ForCausalLM"), "DeepseekV2ForCausalLM"),
        (config({"quant_method": "fp8"}), "one scale for each tensor"),
        (config(BLOCKED | {"weight_block_size": [64, 64]}), r"\[64, 64\]"),
        (config(BLOCKED | {"fmt": "e5m2"}), "e5m2"),
        (config(BLOCKED | {"scale_fmt": "other"}), "other"),
        (config(BLOCKED, intermediate_size=4864, moe_intermediate_size=200), "moe_intermediate_size = 200"),
        (
            config(BLOCKED, num_attention_heads=14, hidden_size=896, num_key_value_heads=1),
            "num_key_value_heads . head_dim = 64",
        ),
    ],
)
def test_refused_by_name(given, named):
    with pytest.raises(UnsupportedFeatureError, match=named) as caught:
        check_support(given)
    assert "Next step:" in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        *(config(W8A8, name) for name in W8A8_SERVED),
        config(W8A8 | {"quant_dtype": "float8_e4m3fn"}),
        config(BLOCKED, intermediate_size=256),
        config(
            BLOCKED | {"scale_fmt": "ue8m0", "fmt": "e4m3", "activation_scheme": "dynamic"},
            "Qwen3MoeForCausalLM",
        ),
        config(BLOCKED, "DeepseekV2ForCausalLM", num_attention_heads=4, hidden_size=64, kv_lora_rank=64),
        config({"quant_method": "fp8", "activation_scheme": "static"}, intermediate_size=100),
    ],
    ids=str,
)
def test_taken(given):
    check_support(given)


@pytest.mark.parametrize(
    "keys",
    [{"w_bit": 4, "q_group_size": 64}, {"w_bit": 8, "group_size": 64}, {"bits": 4, "q_group_size": 64}],
)
def test_autoawqs_own_keys_are_refused(keys):
    with pytest.raises(UnsupportedFeatureError, match=r"AutoAWQ.s keys in quantization_config") as caught:
        check_support(config(AWQ | keys))
    assert "rename w_bit to bits and q_group_size to group_size in config.json" in str(caught.value)


def test_autoawqs_own_keys_beside_those_of_transformers_are_taken():
    check_support(config(AWQ | {"bits": 4, "group_size": 64}))
    check_support(config(AWQ | {"bits": 4, "group_size": 64, "w_bit": 4, "q_group_size": 64}))


# --- layers


@pytest.fixture(autouse=True)
def on_cpu():
    PytorchEngineConfig(device_type="cpu")
    torch.manual_seed(0)


def build(spec: Any) -> Any:
    return get_backend("cpu").build_op(spec)


MOE: dict[str, Any] = {"top_k": 2, "num_experts": 4, "renormalize": True, "output_dtype": torch.bfloat16}
PARALLEL: dict[str, Any] = {"ep_size": 1, "ep_group": None}
BLOCKED_MOE = FusedMoEBlockedF8BuildSpec(
    **MOE,
    **PARALLEL,
    hidden_dim=64,
    block_size=128,
    fp8_dtype=torch.float8_e4m3fn,
    num_max_dispatch_tokens_per_rank=1,
    layer_idx=0,
    custom_gateup_act=False,
    scale_fmt=None,
)
E5M2 = torch.float8_e5m2


@pytest.mark.parametrize(
    "spec",
    [
        RMSNormW8A8BuildSpec(64, quant_dtype=E5M2),
        LinearW8A8BuildSpec(64, 64, False, torch.bfloat16, E5M2),
        LinearBlockedF8BuildSpec(64, 64, 128, False, torch.bfloat16, E5M2, None),
        LinearStaticF8BuildSpec(64, 64, False, torch.bfloat16, E5M2),
        FusedMoEW8A8BuildSpec(**MOE, **PARALLEL, quant_dtype=E5M2),
        FusedMoEW8A8BuildSpec(**MOE, quant_dtype=torch.int8, ep_size=2, ep_group=None),
        FusedMoEStaticF8BuildSpec(**MOE, quant_dtype=E5M2),
        dataclasses.replace(BLOCKED_MOE, fp8_dtype=E5M2),
        dataclasses.replace(BLOCKED_MOE, custom_gateup_act=True),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_what_no_op_serves_is_refused_as_a_layer_is_built(spec):
    with pytest.raises(UnsupportedFeatureError):
        build(spec)


def test_a_norm_feeds_a_linear_layer():
    x, residual, gain = torch.randn(1, 5, 64), torch.randn(1, 5, 64), torch.randn(64)
    weight, scale = ops.dynamic_quant(torch.randn(48, 64), torch.int8)
    norm, linear = (
        build(RMSNormW8A8BuildSpec(64, 1e-5)),
        build(LinearW8A8BuildSpec(64, 48, False, torch.float32, torch.int8)),
    )
    out, total = norm.forward(x, gain, residual)
    assert isinstance(out, QTensor)
    assert torch.equal(total, x + residual)
    got, alone = linear.forward(out, weight, scale), norm.forward(total, gain)
    assert torch.equal(alone.tensor, out.tensor)
    torch.testing.assert_close(got, linear.forward(ops.rms_norm(total, gain, 1e-5), weight, scale))
    want = torch.nn.functional.linear(ops.rms_norm(total, gain, 1e-5), weight.float() * scale)
    assert (got - want).abs().max() < want.abs().max() / 50


def test_experts_with_biases_are_refused():
    layer = build(BLOCKED_MOE)
    with pytest.raises(UnsupportedFeatureError, match="biases"):
        layer.forward(*[torch.ones(1)] * 7, gate_up_bias=torch.ones(1))


def test_experts_scales_stay_float32():
    """LMDeploy's own implementation for dlinfer rounds them to bfloat16."""
    layer = build(FusedMoEW8A8BuildSpec(**MOE, **PARALLEL, quant_dtype=torch.int8))
    scales = torch.rand(4, 8, 1)
    assert layer.update_weights(None, None, scales, scales)[2] is scales
