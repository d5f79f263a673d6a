"""CogVLM and CogVLM2, as their authors' own code computes them and LMDeploy's does not in some places.

Weights of the vision expert are for an image's opening token and its pieces; the closing token goes through those of
text. Which tokens these are follows from where the image lies, and not from an id, which a text may hold too.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.lmdeploy_ext.vision.one_position import of_images, pixels
from dlinfer.framework.patching import Patch

ARCHITECTURE = "CogVLMForCausalLM"
SECOND_BASE = 500000
"""Base of CogVLM2's rotary frequencies, which is in its code and not in its configuration."""

IMAGE = "<IMAGE_TOKEN>"
"""What LMDeploy puts into a prompt in the place of an image."""


def with_images(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the language model with features in the place of pixels.

    A prefill without images says that no token is an image's, so that it runs the graph of one with images.
    """
    images, embeds = given.pop("images", None), given["inputs_embeds"]
    if given["attn_metadata"].is_decoding:
        return given
    if images is not None:
        given["inputs_embeds"] = _filled(embeds, model.model.vision(images), given["vision_ids"])
    elif given.get("vision_ids") is None:
        every = torch.arange(embeds.shape[1], device=embeds.device)
        given |= {"lang_ids": every, "vision_ids": every[:0]}
    return given


def _filled(embeds: Tensor, features: Tensor, experts: Tensor) -> Tensor:
    """embeds [1, tokens, hidden] with features [images, tokens of an image, hidden] in their places.

    experts: int64, places of all tokens of images but their closing ones, in the images' order. embeds is changed.
    """
    closing = experts.view(len(features), -1)[:, -1] + 1
    embeds[0, experts] = features[:, :-1].flatten(0, 1).to(embeds)
    embeds[0, closing] = features[:, -1].to(embeds)
    return embeds


def _prepare(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def prepare_inputs_for_generation(
        self: Any, past_key_values: Any, inputs_embeds: Tensor | None = None, context: Any = None
    ) -> dict[str, Any]:
        if activation.active() is None:
            return original(self, past_key_values, inputs_embeds, context)
        images = pixels(context)
        made = {
            "input_ids": context.input_ids,
            "position_ids": context.position_ids,
            "past_key_values": past_key_values,
            "attn_metadata": context.attn_metadata,
            "images": images,
            "inputs_embeds": inputs_embeds,
            "lang_ids": None,
            "vision_ids": None,
        }
        if images is None:
            return made
        seen = of_images(context, closing=False)
        return made | {"lang_ids": (~seen).nonzero().flatten(), "vision_ids": seen.nonzero().flatten()}

    return prepare_inputs_for_generation


def _forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(
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
        if images is not None and activation.active() is not None:
            assert vision_ids is not None
            inputs_embeds = _filled(self.embed_tokens(input_ids), self.vision(images), vision_ids)
            images = None
        return original(
            self,
            input_ids,
            position_ids,
            past_key_values,
            attn_metadata,
            images,
            inputs_embeds,
            lang_ids,
            vision_ids,
        )

    return forward


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build(cls: Any, hf_config: Any, model_path: Any = None, **kwargs: Any) -> Any:
        if activation.active() is None:
            return original(cls, hf_config, model_path, **kwargs)
        from lmdeploy.pytorch.configurations.default import DefaultModelConfigBuilder

        heads = getattr(hf_config, "num_multi_query_heads", None) or hf_config.num_attention_heads
        hf_config.num_key_value_heads = heads
        hf_config.pad_token_id = getattr(hf_config, "pad_token_id", None)
        made = DefaultModelConfigBuilder.build(hf_config, model_path, **kwargs)
        made.cogvlm_style = True
        return made

    return build


def _rotary(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
        original(self, config, dtype, device)
        if activation.active() is not None and hasattr(config, "num_multi_query_heads"):
            from lmdeploy.pytorch.nn import RopeType, build_rotary_embedding

            size = config.hidden_size // config.num_attention_heads
            self.rotary_emb = build_rotary_embedding(size, 2048, SECOND_BASE, emb_type=RopeType.LinearScaling)

    return __init__


def _messages(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def proc_messages(
        messages: Any, chat_template: Any, tools: Any = None, chat_template_kwargs: Any = None
    ) -> tuple[str, str]:
        if activation.active() is None:
            return original(messages, chat_template, tools, chat_template_kwargs)
        from lmdeploy.model import CogVLM

        # A template of the tokenizer's is for text alone: the network was taught images with questions and answers.
        template = chat_template if getattr(chat_template, "user", None) else CogVLM()
        said, seen = [], ""
        for message in messages:
            content = message["content"]
            if message["role"] in ("images", "preprocess", "forward"):
                continue
            if isinstance(content, list):
                seen += IMAGE * sum(part["type"] == "image" for part in content)
                content = "\n".join(part.get("text", "") for part in content if part["type"] == "text")
            said.append({"role": message["role"], "content": content})
        return seen + template.messages2prompt(said, tools=tools, **(chat_template_kwargs or {})), IMAGE

    return proc_messages


_CONFIGURATIONS = "lmdeploy.pytorch.configurations.cogvlm"
_MODEL = "lmdeploy.pytorch.models.cogvlm"
PATCHES = (
    Patch(
        target=f"{_CONFIGURATIONS}:CogVLMModelConfigBuilder.build",
        why="asks CUDA whether it knows bfloat16, and puts the answer in the place of the model's dtype",
        signature="(cls, hf_config, model_path=None, **kwargs)",
        build=_build,
        versions=FAULTY,
    ),
    Patch(
        target=f"{_MODEL}:CogVLMModel.__init__",
        why="rotates CogVLM2's heads by CogVLM's frequencies",
        signature="(self, config, dtype=None, device=None)",
        build=_rotary,
        versions=FAULTY,
    ),
    Patch(
        target=f"{_MODEL}:CogVLMModel.forward",
        why="gives the closing token of an image to the vision expert",
        signature="(self, input_ids=None, position_ids=None, past_key_values=None, attn_metadata=None, images=None, "
        "inputs_embeds=None, lang_ids=None, vision_ids=None)",
        build=_forward,
        versions=FAULTY,
    ),
    Patch(
        target=f"{_MODEL}:CogVLMForCausalLM.prepare_inputs_for_generation",
        why="takes every padding token of a text for a piece of an image",
        signature="(self, past_key_values, inputs_embeds=None, context=None)",
        build=_prepare,
        versions=FAULTY,
    ),
    Patch(
        target="lmdeploy.vl.model.cogvlm:CogVLMVisionModel.proc_messages",
        why="drops all but the first text of a message, and looks for a field that templates of tokenizers do not have",
        signature="(messages, chat_template, tools=None, chat_template_kwargs=None)",
        build=_messages,
        versions=FAULTY,
    ),
)
