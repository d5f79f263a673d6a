"""What is put right in LMDeploy's Gemma 3 with images: which tokens stand for images, and names of weights."""

from types import SimpleNamespace

import pytest
import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import gemma3_vl

IMAGE = 9


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")


def test_no_mask_is_made() -> None:
    masks = gemma3_vl._no_masks.build(None)  # pyright: ignore[reportArgumentType]
    assert masks(None, torch.zeros(3), torch.arange(3), torch.float32, other=1) == {"other": 1}


@pytest.mark.parametrize("name", ["vision_tower.vision_model.x.weight", "vision_tower.x.weight"])
def test_weights_of_the_vision_part_have_two_names(name: str) -> None:
    loaded: list[str] = []
    language = SimpleNamespace(load_weights=lambda weights: loaded.extend(name for name, _ in weights))
    load = gemma3_vl._load_weights.build(lambda self, weights: loaded.extend(name for name, _ in weights))
    tensor = torch.empty(0)
    load(SimpleNamespace(language_model=language), [("language_model.y", tensor), (name, tensor)])
    assert loaded == ["y", "vision_tower.vision_model.x.weight"]


def test_an_image_token_in_a_text_is_a_token() -> None:
    image = SimpleNamespace(start=2, end=4)
    context = SimpleNamespace(
        attn_metadata=SimpleNamespace(block_offsets=torch.zeros(1, 1, dtype=torch.int32)),
        input_ids=torch.tensor([[IMAGE, 1, IMAGE, IMAGE, 2]]),
        q_start_loc=torch.tensor([0]),
        q_seqlens=torch.tensor([5]),
        kv_seqlens=torch.tensor([5]),
        input_multimodals=[{"image": [image]}],
    )
    inputs = {"image_mask": context.input_ids == IMAGE}
    prepare = gemma3_vl._with_images.build(lambda *rest, **named: inputs)
    assert prepare(None, context=context)["image_mask"].tolist() == [[False, False, True, True, False]]
    assert context.attn_metadata.image_rows.tolist() == [2, 3]
