"""Messages with videos, sounds or time series are refused by name; images are served."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse
from dlinfer.framework.patching import Patch

_IMAGES = ("text", "image", "image_url", "image_data")
_OF_ONE_IMAGE = {"CogVLMVisionModel": "CogVLM", "GLM4VisionModel": "GLM-4V"}
"""LMDeploy's class -> the model, which was trained with one image in a conversation."""
_KINDS = {"video": "video", "audio": "audio", "time_series": "time series"}


def check_messages(messages: Iterable[Any]) -> None:
    """Raise UnsupportedFeatureError for the first part of a message that is neither text nor an image."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind in _IMAGES:
                continue
            named = _KINDS.get(kind.removesuffix("_url"), repr(kind))
            raise refuse(f"{named} input", "send text and images")


def check_one_image(messages: Iterable[Any], model: str) -> None:
    """Raise UnsupportedFeatureError for a conversation of several images, which a model was not made for."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    if sum(kind in _IMAGES[1:] for kind in kinds) > 1:
        raise refuse(f"more than one image in a conversation with {model}", "send one image")


def _get_multimodal_prompt_input(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def _get_multimodal_prompt_input(
        self: Any, messages: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        if activation.active() is not None:
            from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

            try:
                check_messages(messages)
                seen = type(getattr(self.vl_encoder, "model", None)).__name__
                if seen in _OF_ONE_IMAGE:
                    check_one_image(messages, _OF_ONE_IMAGE[seen])
            except UnsupportedFeatureError as error:  # of others LMDeploy says that preprocessing failed
                raise RequestError(ErrorCode.UNSUPPORTED_FEATURE, str(error)) from error
        return await original(self, messages, *args, **kwargs)

    return _get_multimodal_prompt_input


PATCHES = (
    Patch(
        target="lmdeploy.serve.processors.multimodal:MultimodalProcessor._get_multimodal_prompt_input",
        why="hands videos to processors of images",
        signature="(self, messages, do_preprocess, adapter_name, tools=None, chat_template_kwargs=None, "
        "media_io_kwargs=None, mm_processor_kwargs=None, **kwargs)",
        build=_get_multimodal_prompt_input,
    ),
)
