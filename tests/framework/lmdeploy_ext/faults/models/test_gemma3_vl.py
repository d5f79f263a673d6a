"""What is put right in LMDeploy's Gemma 3 with images: the prompt's text around images, and names of weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import gemma3_vl

IMAGE, BEGIN, END = 9, "<boi>", "<eoi>"
PICTURE = {"type": "image", "data": Image.new("RGB", (1, 1))}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")


class Template:
    """A chat template that writes the first token of an image where the image stands."""

    def messages2prompt(self, messages: Any, tools: Any = None) -> str:
        parts = [part for message in messages for part in message["content"]]
        return " ".join(part.get("text", BEGIN) for part in parts)


def prompt_of(*parts: dict[str, Any]) -> dict[str, Any]:
    from lmdeploy.vl.model.gemma3_vl import Gemma3VisionModel as Model

    images = sum(part["type"] == "image" for part in parts)
    preprocessed = [{"image_tokens": 2, "image_token_id": IMAGE} for _ in range(images)]
    messages = [{"role": "user", "content": list(parts)}, {"role": "preprocess", "content": preprocessed}]
    words = SimpleNamespace(encode=lambda text, add_bos: [len(word) for word in text.split()])
    model = SimpleNamespace(
        processor=SimpleNamespace(boi_token=BEGIN, tokenizer=SimpleNamespace(eoi_token=END)),
        image_token_id=IMAGE,
        collect_multimodal_items=Model.collect_multimodal_items,
    )
    model.to_pytorch_aux = lambda *rest: Model.to_pytorch_aux(model, *rest)
    return gemma3_vl._to_pytorch.build(Model.to_pytorch)(model, messages, Template(), words)


def test_images_stay_where_they_are_between_their_tokens() -> None:
    prompt = prompt_of({"type": "text", "text": "a"}, PICTURE, {"type": "text", "text": "bcd"}, PICTURE)
    around = "\n\n<boi><IMAGE_TOKEN><eoi>\n\n"
    assert prompt["prompt"] == f"a {around} bcd {around}"
    assert prompt["input_ids"] == [1, 5, IMAGE, IMAGE, 5, 3, 5, IMAGE, IMAGE, 5]
    assert [image["offset"] for image in prompt["multimodal"]] == [2, 7]


@pytest.mark.parametrize("text", [BEGIN, "<IMAGE_TOKEN>"])
def test_a_text_cannot_stand_for_an_image(text: str) -> None:
    with pytest.raises(ValueError, match="which stand for images"):
        prompt_of({"type": "text", "text": text}, PICTURE)


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
