"""Compute CogVLM and CogVLM2 as their authors' code does, where LMDeploy differs.

In these models a token uses the weights of one of two experts. The opening token and the patch tokens of an image use
the vision expert. The closing token of an image, like text, uses the text expert. Image tokens are found by the image's
place in the prompt, not by their ids, because a text may contain the same ids.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.models.one_position import of_images, pixels
from dlinfer.framework.patching import Original

ARCHITECTURE = "CogVLMForCausalLM"
SECOND_BASE = 500000
"""Base of CogVLM2's rotary frequencies. Its authors' code has this number, its configuration does not."""

IMAGE = "<IMAGE_TOKEN>"
"""LMDeploy's placeholder for an image in a prompt."""

_MODEL = "lmdeploy.pytorch.models.cogvlm"


def with_images(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's arguments, with image features in ``inputs_embeds`` instead of pixels in ``images``.

    arguments: the arguments that LMDeploy passes. A prefill without images gets an empty ``vision_ids``, so that one
    graph serves prefills with and without images.
    """
    images, embeds = arguments.pop("images", None), arguments["inputs_embeds"]
    if arguments["attn_metadata"].is_decoding:
        return arguments
    if images is not None:
        arguments["inputs_embeds"] = _filled(embeds, model.model.vision(images), arguments["vision_ids"])
    elif arguments.get("vision_ids") is None:
        every = torch.arange(embeds.shape[1], device=embeds.device)
        arguments |= {"lang_ids": every, "vision_ids": every[:0]}
    return arguments


def _filled(embeds: Tensor, features: Tensor, experts: Tensor) -> Tensor:
    """Write features [images, tokens of an image, hidden] into embeds [1, tokens, hidden], and return embeds.

    experts: int64, the indices of all image tokens that use the vision expert, in the order of the images.
    """
    closing = experts.view(len(features), -1)[:, -1] + 1
    embeds[0, experts] = features[:, :-1].flatten(0, 1).to(embeds)
    embeds[0, closing] = features[:, -1].to(embeds)
    return embeds


@corrects(
    f"{_MODEL}:CogVLMForCausalLM.prepare_inputs_for_generation",
    why="treats every padding token of a text as a part of an image",
)
def prepare(
    original: Original, self: Any, past_key_values: Any, inputs_embeds: Any = None, context: Any = None
) -> dict[str, Any]:
    images = pixels(context)
    seen = None if images is None else of_images(context, closing=False)
    return {
        "input_ids": context.input_ids,
        "position_ids": context.position_ids,
        "past_key_values": past_key_values,
        "attn_metadata": context.attn_metadata,
        "images": images,
        "inputs_embeds": inputs_embeds,
        "lang_ids": None if seen is None else (~seen).nonzero().flatten(),
        "vision_ids": None if seen is None else seen.nonzero().flatten(),
    }


@corrects(
    f"{_MODEL}:CogVLMModel.forward", why="computes the closing token of an image with the vision expert"
)
def forward(
    original: Original,
    self: Any,
    input_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    attn_metadata: Any = None,
    images: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    lang_ids: Tensor | None = None,
    vision_ids: Tensor | None = None,
) -> Tensor:
    if images is not None:
        assert vision_ids is not None
        inputs_embeds = _filled(self.embed_tokens(input_ids), self.vision(images), vision_ids)
    step = (input_ids, position_ids, past_key_values, attn_metadata, None)
    return original(self, *step, inputs_embeds, lang_ids, vision_ids)


@corrects(
    "lmdeploy.pytorch.configurations.cogvlm:CogVLMModelConfigBuilder.build",
    why="asks CUDA whether it supports bfloat16, and overwrites the model's dtype with the answer",
)
def build(original: Original, cls: Any, hf_config: Any, model_path: Any = None, **kwargs: Any) -> Any:
    from lmdeploy.pytorch.configurations.default import DefaultModelConfigBuilder

    heads = getattr(hf_config, "num_multi_query_heads", None) or hf_config.num_attention_heads
    hf_config.num_key_value_heads = heads
    hf_config.pad_token_id = getattr(hf_config, "pad_token_id", None)
    config = DefaultModelConfigBuilder.build(hf_config, model_path, **kwargs)
    config.cogvlm_style = True
    return config


@corrects(f"{_MODEL}:CogVLMModel.__init__", why="rotates CogVLM2's heads with CogVLM's frequencies")
def init(original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
    original(self, config, dtype, device)
    if hasattr(config, "num_multi_query_heads"):
        from lmdeploy.pytorch.nn import RopeType, build_rotary_embedding

        size = config.hidden_size // config.num_attention_heads
        self.rotary_emb = build_rotary_embedding(size, 2048, SECOND_BASE, emb_type=RopeType.LinearScaling)


@corrects(
    "lmdeploy.vl.model.cogvlm:CogVLMVisionModel.proc_messages",
    why="drops all texts of a message but the first, and reads a field that a tokenizer's template does not have",
)
def proc_messages(
    original: Original, messages: Any, chat_template: Any, tools: Any = None, chat_template_kwargs: Any = None
) -> tuple[str, str]:
    from lmdeploy.model import CogVLM

    # The tokenizer's template is for text only. With images the model was trained on questions and answers.
    template = chat_template if getattr(chat_template, "user", None) else CogVLM()
    texts, images = [], ""
    for message in messages:
        content = message["content"]
        if message["role"] in ("images", "preprocess", "forward"):
            continue
        if isinstance(content, list):
            images += IMAGE * sum(part["type"] == "image" for part in content)
            content = "\n".join(part.get("text", "") for part in content if part["type"] == "text")
        texts.append({"role": message["role"], "content": content})
    return images + template.messages2prompt(texts, tools=tools, **(chat_template_kwargs or {})), IMAGE
