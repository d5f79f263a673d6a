"""Refuses messages with videos, audio or time series, and several images for models that accept only one."""

from collections.abc import Iterable, Iterator
from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.request.http_errors import request_error
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.faults.models.image_prompts import has_torchvision
from dlinfer.framework.patching import Original, replaces

_IMAGES = ("image", "image_url", "image_data")
_OF_ONE_IMAGE = {"CogVLMVisionModel": "CogVLM", "GLM4VisionModel": "GLM-4V"}
"""LMDeploy's vision class -> name of a model that was trained with only one image in a conversation."""
_KINDS = {"video": "video", "audio": "audio", "time_series": "time series"}


def _kinds(messages: Iterable[Any]) -> Iterator[Any]:
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (part.get("type") for part in parts if isinstance(part, dict))


def check_messages(messages: Iterable[Any]) -> None:
    """Raise UnsupportedFeatureError if a part of a message is neither text nor an image."""
    for kind in _kinds(messages):
        if isinstance(kind, str) and kind not in ("text", *_IMAGES):
            raise refuse(f"{_KINDS.get(kind.removesuffix('_url'), repr(kind))} input", "send text and images")


def check_one_image(messages: Iterable[Any], model: str) -> None:
    """Raise UnsupportedFeatureError if the messages hold several images. model: the model's name for the error."""
    if sum(kind in _IMAGES for kind in _kinds(messages)) > 1:
        raise refuse(f"more than one image in a conversation with {model}", "send one image")


def check_torchvision(messages: Iterable[Any], encoder: Any) -> None:
    """Raise UnsupportedFeatureError if the messages hold images of Llama 4, and torchvision is missing."""
    is_llama4 = type(getattr(encoder, "model", None)).__name__ == "LLama4VisionModel"
    if is_llama4 and not has_torchvision() and any(kind in _IMAGES for kind in _kinds(messages)):
        raise refuse("image input of Llama 4 without torchvision", "install torchvision, or send text")


@replaces(
    "lmdeploy.serve.processors.multimodal:MultimodalProcessor._get_multimodal_prompt_input",
    why="passes videos to processors of images",
    when=activation.is_on,
    signature="(self, messages, do_preprocess, adapter_name, tools=None, chat_template_kwargs=None, "
    "media_io_kwargs=None, mm_processor_kwargs=None, **kwargs)",
)
async def prompt_input(
    original: Original, self: Any, messages: list[dict[str, Any]], *args: Any, **kwargs: Any
) -> Any:
    try:
        check_messages(messages)
        check_torchvision(messages, self.vl_encoder)
        model = _OF_ONE_IMAGE.get(type(getattr(self.vl_encoder, "model", None)).__name__)
        if model is not None:
            check_one_image(messages, model)
    except UnsupportedFeatureError as error:  # LMDeploy reports other error classes as failed preprocessing
        raise request_error("UNSUPPORTED_FEATURE", str(error)) from error
    return await original(self, messages, *args, **kwargs)
