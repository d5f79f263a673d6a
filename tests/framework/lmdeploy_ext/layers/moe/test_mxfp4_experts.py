"""Experts of gpt-oss in MXFP4: numbers, names, the layer that keeps them packed, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model.support import check_support
from dlinfer.framework.lmdeploy_ext.conversion.loading import rewrite
from dlinfer.framework.lmdeploy_ext.conversion.plan import plan_of
from dlinfer.framework.lmdeploy_ext.layers.moe import experts_model
from dlinfer.framework.lmdeploy_ext.layers.moe.mxfp4_experts import (
    FusedMoEMxfp4,
    Mxfp4Weights,
    powers,
)
from dlinfer.framework.lmdeploy_ext.preflight.check import preflight
from dlinfer.ops.quantised.packing import MXFP4
from tests.e2e import packed_model
from tests.framework.lmdeploy_ext.conversion import conversion_files

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
MODEL: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}


def weights(experts: int, into: int, out: int, is_gate_up: bool = False) -> Any:
    return Mxfp4Weights(experts, into, out, is_gate_up, torch.float32, None)


def meaning(part: Any, expert: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[in, out] of one expert."""
    return MXFP4.dequantise(part.blocks[expert], part.scales[expert], None, dtype)


def test_every_number_of_every_scale():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(1, 16, 256, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 1, 256).expand(1, 16, 256)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    exact = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127)
    exact[255] = torch.nan
    torch.testing.assert_close(powers().double(), exact, rtol=0, atol=0, equal_nan=True)
    expected = steps[codes & 7] * (1 - 2 * (codes >> 3)) * exact[:, None]
    part = weights(1, 256 * 32, 16)
    part.load_blocks(part.blocks, blocks)
    part.load_scales(part.scales, scales)
    torch.testing.assert_close(meaning(part, 0).t(), expected.flatten(2)[0], rtol=0, atol=0, equal_nan=True)


def test_a_checkpoint_is_loaded_whole_with_gate_before_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experts_model.activation, "_active", "cpu")
    load = experts_model._load_gpt_oss_experts.build(lambda *_: None)
    gate_up, down = weights(3, 64, 2 * 96, True), weights(3, 96, 64)
    parts = {"gate_up": gate_up, "down": down}
    where = "model.layers.0.mlp.experts"
    params = {
        f"{where}.experts.{name}.{kind}": getattr(part, kind)
        for name, part in parts.items()
        for kind in ("blocks", "scales", "bias")
    }
    for name, (out, into) in {"gate_up": (192, 64), "down": (64, 96)}.items():
        numbers, blocks, scales = conversion_files.mxfp4(torch.randn(3, out, into))
        bias = torch.randn(3, out)
        for kind, given in (("blocks", blocks), ("scales", scales), ("bias", bias)):
            plan = plan_of(CONFIG, MODEL)
            assert plan is not None
            (made,) = plan.convert(f"{where}.{name}_proj_{kind}", given, None)
            assert made[1] is given
            load(None, *made, params)
        rows = torch.cat([torch.arange(0, out, 2), torch.arange(1, out, 2)])
        rows = rows if name == "gate_up" else torch.arange(out)
        for expert in range(3):
            assert torch.equal(meaning(parts[name], expert).t(), numbers[expert, rows].double())
        assert torch.equal(parts[name].bias, bias[:, rows])
    x, ids = torch.randn(5, 64), torch.randint(3, (5, 2))
    shares = torch.rand(5, 2)
    given = (gate_up.blocks, gate_up.scales, gate_up.bias, down.blocks, down.scales, down.bias)
    wide = [
        torch.stack([meaning(part, expert, torch.float32).t() for expert in range(3)])
        for part in (gate_up, down)
    ]
    clamped = ops.fused_moe_clamped(x, wide[0], gate_up.bias, wide[1], down.bias, shares, ids, 1.702, 7.0)
    got = FusedMoEMxfp4(1.702, 7.0).forward(x, shares, ids, *given)
    assert (got - clamped).abs().max() < 1e-6 * clamped.abs().max()


def test_other_sizes_are_refused():
    part = weights(2, 64, 96)
    for given in (torch.zeros(2, 96, 2, 16), torch.zeros(2, 96, 1, 16, dtype=torch.uint8)):
        with pytest.raises(UnsupportedFeatureError, match="blocks of experts in MXFP4 with"):
            part.load_blocks(part.blocks, given)
    with pytest.raises(UnsupportedFeatureError, match="scales of experts in MXFP4 with"):
        part.load_scales(part.scales, torch.zeros(2, 96, 3, dtype=torch.uint8))
    with pytest.raises(UnsupportedFeatureError, match="with 48 inputs and 96 outputs"):
        weights(2, 48, 96)


def test_lmdeploy_is_given_a_model_in_floats_that_says_how_its_experts_are_packed():
    config = SimpleNamespace(quantization_config=CONFIG, to_dict=lambda: MODEL)
    rewrite(config)
    assert config.experts_packed_as == "mxfp4"
    assert not hasattr(config, "quantization_config")


def test_preflight_counts_packed_experts(tmp_path):
    packed_model.build_mxfp4(tmp_path)
    report = preflight(tmp_path, "cpu", session_len=256, max_batch_size=2)
    assert report.refusals == []
    assert {one.op: one.vendor for one in report.ops}["fused_moe_mxfp4"] == "cpu"
    tensors = [tensor for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).items()]
    scales = sum(one.nbytes for name, one in tensors if name.endswith("_scales"))
    assert report.memory is not None
    kept = sum(one.nbytes for _, one in tensors) + scales  # which become bfloat16
    assert kept <= report.memory.weights < 1.001 * kept  # LMDeploy has attention's sinks in float32


def test_other_models_are_refused():
    check_support(MODEL | {"quantization_config": CONFIG})
    with pytest.raises(UnsupportedFeatureError, match="mxfp4 in a model other than gpt-oss"):
        check_support(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": CONFIG}
        )
