"""Qwen3.5's draft gets embeddings in every step: its own of the tokens, or those that a step with images brings."""

from types import SimpleNamespace
from typing import Any

import torch
from lmdeploy.pytorch.models.qwen3_5_mtp import Qwen3_5MTPModel

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.vision import draft_embeddings


def prepared(monkeypatch: Any, with_images: torch.Tensor | None) -> dict[str, Any]:
    monkeypatch.setattr(activation, "_active", "cpu")
    context = SimpleNamespace(
        input_ids=torch.tensor([[3, 1]]),
        position_ids=None,
        attn_metadata=None,
        target_hidden_states=None,
        target_inputs_embeds=with_images,
    )
    model = SimpleNamespace(get_input_embeddings=lambda: lambda ids: ids[..., None] * torch.ones(4))
    original = Qwen3_5MTPModel.prepare_inputs_for_generation
    build = draft_embeddings._prepare_inputs.build(getattr(original, "__wrapped__", original))
    return build(model, [], context=context)


def test_tokens_are_embedded(monkeypatch: Any) -> None:
    inputs = prepared(monkeypatch, None)
    torch.testing.assert_close(inputs["inputs_embeds"], torch.tensor([[[3.0] * 4, [1.0] * 4]]))


def test_embeddings_with_images_stay(monkeypatch: Any) -> None:
    images = torch.randn(1, 2, 4)
    assert prepared(monkeypatch, images)["inputs_embeds"] is images
