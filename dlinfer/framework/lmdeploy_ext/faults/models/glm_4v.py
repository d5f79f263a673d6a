"""Correct GLM-4V (glm-4v-9b). It is ChatGLM with an image encoder, whose features replace the tokens of an image.

The tokens of an image are found by the image's place in the prompt, not by their ids, because a text may contain the
same ids.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.models.one_position import of_images, pixels
from dlinfer.framework.patching import Original

CLASS = "ChatGLMForConditionalGeneration"


def with_images(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's arguments, with image features in ``inputs_embeds`` instead of pixels in ``images``.

    arguments: the arguments that LMDeploy passes.
    """
    images, mask = arguments.pop("images", None), arguments.pop("image_mask", None)
    if images is not None:
        features = model.transformer.vision(images).flatten(0, 1)[None]
        embeds = arguments["inputs_embeds"]
        arguments["inputs_embeds"] = embeds.masked_scatter(mask[..., None], features.to(embeds))
    return arguments


@corrects(
    f"lmdeploy.pytorch.models.chatglm2:{CLASS}.prepare_inputs_for_generation",
    why="treats every padding token of a text as a part of an image",
)
def prepare(
    original: Original, self: Any, past_key_values: Any, inputs_embeds: Any = None, context: Any = None
) -> dict[str, Any]:
    inputs = original(self, past_key_values, inputs_embeds, context)
    if pixels(context) is not None:
        inputs["image_mask"] = of_images(context, closing=True)[None]
    return inputs


@corrects(
    "lmdeploy.vl.model.glm4_v:GLM4VisionModel.proc_messages", why="drops all texts of a message but the first"
)
def proc_messages(
    original: Original, messages: Any, chat_template: Any, tools: Any = None, chat_template_kwargs: Any = None
) -> tuple[str, str]:
    return original([_joined(message) for message in messages], chat_template, tools, chat_template_kwargs)


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text parts joined into one. The joined part comes after all other parts."""
    content = message["content"]
    if not isinstance(content, list) or message["role"] in ("preprocess", "forward"):
        return message
    text = "\n".join(part["text"] for part in content if part["type"] == "text")
    others = [part for part in content if part["type"] != "text"]
    return message | {"content": [*others, {"type": "text", "text": text}]}
