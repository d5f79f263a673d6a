"""Experts of gpt-oss in MXFP4: numbers, names, the order of files, and what is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.conversion import mxfp4
from dlinfer.framework.lmdeploy_ext.refusals.model_support import check_support
from tests.framework.lmdeploy_ext import conversion_files

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
MODEL: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}


def test_every_number_of_every_scale():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(1, 16, 256, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 1, 256).expand(1, 16, 256)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    powers = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127)
    powers[255] = torch.nan
    expected = steps[codes & 7] * (1 - 2 * (codes >> 3)) * powers[:, None]
    made = mxfp4.widened(blocks, scales)
    assert made.shape == (1, 16, 256 * 32)
    torch.testing.assert_close(made, expected.flatten(2).bfloat16(), rtol=0, atol=0, equal_nan=True)


def convert(*tensors: tuple[str, Tensor]) -> dict[str, Tensor]:
    plan = mxfp4.plan(CONFIG, MODEL)
    return dict(made for name, tensor in tensors for made in plan.convert(name, tensor, None))


@pytest.mark.parametrize("first", [0, 1])
def test_parts_come_in_any_order(first):
    """They may lie in different files. LMDeploy reads [experts, in, out], as unquantised checkpoints have it."""
    numbers, blocks, scales = conversion_files.mxfp4(torch.randn(2, 6, 64))
    owner = "model.layers.0.mlp.experts.gate_up_proj"
    parts = [(f"{owner}_blocks", blocks), (f"{owner}_scales", scales)]
    bias = (f"{owner}_bias", torch.randn(2, 6))
    with pytest.warns(UserWarning, match="four times the memory"):
        made = convert(parts[first], bias, parts[1 - first])
    assert made.keys() == {owner, bias[0]}
    assert made[bias[0]] is bias[1]
    assert torch.equal(made[owner].float(), numbers.transpose(1, 2))


def test_it_is_said_once():
    _, blocks, scales = conversion_files.mxfp4(torch.randn(1, 2, 32))
    layers = [
        (f"{n}.down_proj_{part}", one) for n in "ab" for part, one in (("blocks", blocks), ("scales", scales))
    ]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        convert(*layers)
    assert len(said) == 1


def test_other_models_are_refused():
    check_support(MODEL | {"quantization_config": CONFIG})
    with pytest.raises(UnsupportedFeatureError, match="mxfp4 in another model than gpt-oss"):
        check_support(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": CONFIG}
        )
