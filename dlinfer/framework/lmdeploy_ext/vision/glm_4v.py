"""GLM-4V (glm-4v-9b): ChatGLM behind an encoder of images, whose features stand in the place of an image's tokens.

Which tokens these are follows from where the image lies, and not from an id, which a text may hold too.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.lmdeploy_ext.vision.one_position import of_images, pixels
from dlinfer.framework.patching import Patch

CLASS = "ChatGLMForConditionalGeneration"


def with_images(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the language model with features in the place of pixels."""
    images, mask = given.pop("images", None), given.pop("image_mask", None)
    if images is not None:
        features = model.transformer.vision(images).flatten(0, 1)[None]
        embeds = given["inputs_embeds"]
        given["inputs_embeds"] = embeds.masked_scatter(mask[..., None], features.to(embeds))
    return given


def _prepare(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def prepare_inputs_for_generation(
        self: Any, past_key_values: Any, inputs_embeds: Tensor | None = None, context: Any = None
    ) -> dict[str, Any]:
        made = original(self, past_key_values, inputs_embeds, context)
        if activation.active() is not None and pixels(context) is not None:
            made["image_mask"] = of_images(context, closing=True)[None]
        return made

    return prepare_inputs_for_generation


def _messages(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def proc_messages(
        messages: Any, chat_template: Any, tools: Any = None, chat_template_kwargs: Any = None
    ) -> tuple[str, str]:
        if activation.active() is not None:
            messages = [_joined(message) for message in messages]
        return original(messages, chat_template, tools, chat_template_kwargs)

    return proc_messages


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A message with one text, which is all that LMDeploy takes of it."""
    content = message["content"]
    if not isinstance(content, list) or message["role"] in ("preprocess", "forward"):
        return message
    text = "\n".join(part["text"] for part in content if part["type"] == "text")
    others = [part for part in content if part["type"] != "text"]
    return message | {"content": [*others, {"type": "text", "text": text}]}


_MODEL = f"lmdeploy.pytorch.models.chatglm2:{CLASS}"
PATCHES = (
    Patch(
        target=f"{_MODEL}.prepare_inputs_for_generation",
        why="takes every padding token of a text for a piece of an image",
        signature="(self, past_key_values, inputs_embeds=None, context=None)",
        build=_prepare,
        versions=FAULTY,
    ),
    Patch(
        target="lmdeploy.vl.model.glm4_v:GLM4VisionModel.proc_messages",
        why="drops all but the first text of a message",
        signature="(messages, chat_template, tools=None, chat_template_kwargs=None)",
        build=_messages,
        versions=FAULTY,
    ),
)
