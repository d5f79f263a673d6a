"""What is put right in LMDeploy's Llama 4: the encoder's rotary table, and images without torchvision."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.pytorch.models import llama4 as models
from torch.nn import functional
from transformers import Llama4VisionConfig
from transformers.models.llama4 import modeling_llama4 as oracle

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.request import media
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import image_prompts, llama4


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_attend_as_in_transformers(dtype: torch.dtype) -> None:
    config = Llama4VisionConfig(
        hidden_size=32, num_attention_heads=2, image_size=16, patch_size=4, rope_parameters=None
    )
    table = models.Llama4VisionRotaryEmbedding(config)(None)
    assert not table.is_complex()
    projections = torch.randn(3, 17, 3 * 32).to(dtype)
    attention = SimpleNamespace(head_dim=16, qkv_proj=lambda x: x, o_proj=lambda x: x)
    found = llama4._attend_to_patches.build(lambda *_: None)(attention, projections, table)
    q, k, v = (x.unflatten(-1, (2, 16)) for x in projections.chunk(3, -1))
    q, k = oracle.vision_apply_rotary_emb(q, k, oracle.Llama4VisionRotaryEmbedding(config)(q))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_and_k_have_a_norm_without_weights(dtype: torch.dtype) -> None:
    x = torch.randn(5, 2, 16).to(dtype)
    torch.testing.assert_close(llama4._unit(x, 1e-5), oracle.Llama4TextL2Norm(1e-5)(x))


@pytest.mark.parametrize("has", [True, False])
def test_images_without_torchvision_are_refused(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setattr(media, "has_torchvision", lambda: has)
    monkeypatch.setattr(image_prompts, "has_torchvision", lambda: has)
    built: list[Any] = []
    model: Any = type("LLama4VisionModel", (), {})()
    llama4._preprocessor.build(lambda self, trust: built.append(self))(model)
    assert built == [model] * has
    encoder = SimpleNamespace(model=model)
    text = {"role": "user", "content": "x"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    media.check_torchvision([text], encoder)
    media.check_torchvision([image], SimpleNamespace(model=object()))
    if has:
        media.check_torchvision([image], encoder)
        return
    with pytest.raises(UnsupportedFeatureError, match="without torchvision"):
        media.check_torchvision([image], encoder)
