"""Build the token ids of a chat with images as transformers does: the whole text is tokenised at once.

LMDeploy tokenises the parts between images one by one, which may add spaces. It also puts all images of a message
before its first text, and drops further texts.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original, Patch

_WHY = "puts all images before the text, drops further texts of a message, and tokenises the parts one by one"
_NOT_OF_THE_CHAT = ("images", "preprocess", "forward")


def has_torchvision() -> bool:
    """Return whether torchvision is installed, by the same check as in transformers."""
    return importlib.util.find_spec("torchvision") is not None


def corrected(
    target: str, marks: Callable[[Any, Any], dict[str, Any]], why: str = _WHY, **record: Any
) -> Patch:
    """Return a patch of a preprocessing model's ``to_pytorch``, which then returns the prompt of ``with_images``.

    marks: a function that takes the preprocessing model and the tokenizer, and returns the arguments ``place``,
    ``token`` and ``written`` of ``with_images``. record: other fields of the Patch.
    """

    @corrects(target, why=why, **record)
    def to_pytorch(
        original: Original,
        self: Any,
        messages: Any,
        chat_template: Any,
        tokenizer: Any,
        tools: Any = None,
        chat_template_kwargs: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        options = {"tools": tools, **(chat_template_kwargs or {})}
        own = marks(self, tokenizer)
        return with_images(self, messages, chat_template, tokenizer, **own, options=options)

    return to_pytorch


def with_images(
    model: Any,
    messages: list[dict[str, Any]],
    chat_template: Any,
    tokenizer: Any,
    *,
    place: str,
    token: str,
    written: Callable[[dict[str, Any]], str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return what LMDeploy's ``to_pytorch`` returns: the prompt, its token ids, and the images with their offsets.

    model: LMDeploy's preprocessing model, after ``preprocess``, which has appended a message of role "preprocess".
    place: how the chat template writes one image. token: the text of a token that stands for a part of an image.
    written: a function that takes what ``preprocess`` made of an image, and returns its text in the prompt. options:
    keyword arguments of the chat template. Raises ValueError if a text of the chat holds ``place`` or ``token``.
    """
    from lmdeploy.model import HFChatTemplate

    (images,) = (message["content"] for message in messages if message["role"] == "preprocess")
    chat = [message for message in messages if message["role"] not in _NOT_OF_THE_CHAT]
    if not isinstance(chat_template, HFChatTemplate):  # LMDeploy's own templates take texts only
        chat = [message | {"content": _text(message["content"], place)} for message in chat]
    prompt = chat_template.messages2prompt(chat, **options)
    parts = prompt.split(place)
    reason = f"A text of the chat holds {place} or {token}, which stand for images."
    if len(parts) != len(images) + 1:
        raise ValueError(reason)
    texts = [written(image) for image in images]
    prompt = parts[0] + "".join(text + part for text, part in zip(texts, parts[1:], strict=True))
    ids = tokenizer.encode(prompt, add_bos=True)
    places = [index for index, number in enumerate(ids) if number == model.image_token_id]
    counts = [text.count(token) for text in texts]
    if len(places) != sum(counts):
        raise ValueError(reason)
    for image, count in zip(images, counts, strict=True):
        own, places = places[:count], places[count:]
        image |= {"offset": own[0], "image_tokens": own[-1] + 1 - own[0]}  # further tokens may lie between
    return {"prompt": prompt, "input_ids": ids, "multimodal": images}


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else place for part in content)
