"""Prompts with images: the whole text is tokenised at once, and images stay where they are."""

from types import SimpleNamespace
from typing import Any

import pytest
from lmdeploy.model import BaseChatTemplate, HFChatTemplate

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import image_prompts

IMAGE = 9
PICTURE = {"type": "image"}


class Template(HFChatTemplate):
    """A template that knows images."""

    def __init__(self) -> None:
        pass

    def messages2prompt(self, messages: Any, **options: Any) -> str:
        parts = [part for message in messages for part in message["content"]]
        return options["begin"] + " ".join(part.get("text", "<image>") for part in parts)


class Words:
    """A tokenizer of words, in which a word of the text has its length as its id."""

    def encode(self, text: str, add_bos: bool) -> list[int]:
        assert add_bos
        return [IMAGE if word == "i" else len(word) for word in text.replace("i", " i ").split()]


def prompt_of(*parts: dict[str, Any], template: Any = None) -> dict[str, Any]:
    pictures = sum(part["type"] == "image" for part in parts)
    preprocessed = [{"image_tokens": 2 + place} for place in range(pictures)]
    messages = [{"role": "user", "content": list(parts)}, {"role": "preprocess", "content": preprocessed}]
    model = SimpleNamespace(image_token_id=IMAGE)
    options = {"begin": "s "} if template is None else {}
    template = template or Template()
    return image_prompts.with_images(
        model,
        messages,
        template,
        Words(),
        place="<image>",
        token="i",
        written=lambda image: f"[{'i' * image['image_tokens']}]",
        options=options,
    )


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_images_stay_where_they_are() -> None:
    prompt = prompt_of(text("a"), PICTURE, text("bcd"), PICTURE)
    assert prompt["prompt"] == "s a [ii] bcd [iii]"
    assert prompt["input_ids"] == [1, 1, 1, IMAGE, IMAGE, 1, 3, 1, IMAGE, IMAGE, IMAGE, 1]
    assert [image["offset"] for image in prompt["multimodal"]] == [3, 8]


def test_templates_of_lmdeploy_get_a_text() -> None:
    prompt = prompt_of(text("ab "), PICTURE, text(" c"), template=BaseChatTemplate(user="u ", eoh=" e"))
    assert prompt["prompt"] == "u ab [ii] c e"
    prompt = prompt_of(text("x"), template=BaseChatTemplate(user="u "))
    assert (prompt["prompt"], prompt["multimodal"]) == ("u x", [])


@pytest.mark.parametrize("words", ["<image>", "i"], ids=["place", "token"])
def test_a_text_cannot_stand_for_an_image(words: str) -> None:
    with pytest.raises(ValueError, match="which stand for images"):
        prompt_of(text(words), PICTURE)


def test_a_patch_takes_the_marks_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")

    def marks(model: Any, tokenizer: Any) -> dict[str, Any]:
        assert (model.image_token_id, type(tokenizer)) == (IMAGE, Words)
        return {"place": "<image>", "token": "i", "written": lambda image: "i" * image["image_tokens"]}

    patch = image_prompts.corrected("lmdeploy.vl.model.llava_hf:LlavaHfVisionModel.to_pytorch", marks)
    to_pytorch = patch.build(None)  # pyright: ignore[reportArgumentType]
    messages = [
        {"role": "user", "content": [text("ab"), PICTURE]},
        {"role": "preprocess", "content": [{"image_tokens": 2}]},
    ]
    model = SimpleNamespace(image_token_id=IMAGE)
    prompt = to_pytorch(model, messages, Template(), Words(), chat_template_kwargs={"begin": "s "})
    assert prompt["prompt"] == "s ab ii"
    assert prompt["multimodal"] == [{"image_tokens": 2, "offset": 2}]


def test_each_model_whose_prompts_are_corrected_has_its_patch() -> None:
    targets = {patch.target for patch in activation.patches().patches}
    names = ("gemma3_vl:Gemma3VisionModel", "llama4:LLama4VisionModel", "llava_hf:LlavaHfVisionModel")
    assert targets >= {f"lmdeploy.vl.model.{name}.to_pytorch" for name in names}
