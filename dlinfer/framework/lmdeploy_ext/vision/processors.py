"""Load image processors without torchvision, which has no build for every torch.

transformers 5 has two versions of each image processor: one for torchvision, and one for pillow if torchvision is
missing. But a processor that also supports videos needs torchvision for its video part. Here a stand-in replaces the
video part. The stand-in is never called, because a message with a video is refused first.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from dlinfer.errors import DlinferError, ModelFolderError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.lmdeploy_ext.faults.models.image_prompts import has_torchvision
from dlinfer.framework.lmdeploy_ext.vision.transforms import with_transforms
from dlinfer.framework.patching import Original, PatchSet, replaces

_loading: ContextVar[bool] = ContextVar("dlinfer_loads_a_processor", default=False)
_lock = threading.RLock()


@functools.cache
def stand_in() -> Any:
    """Return a video processor that refuses every video."""
    from transformers.video_processing_utils import VideoProcessorMixin

    class NoVideos(VideoProcessorMixin):
        def __call__(self, videos: Any, **kwargs: Any) -> Any:
            raise refuse("video input without torchvision", "send frames of the video as images")

    return NoVideos()


@replaces(
    "transformers.processing_utils:ProcessorMixin.check_argument_for_proper_class",
    why="fails to find the class of video processors if torchvision is not installed",
    when=_loading.get,
)
def check_argument(original: Original, self: Any, argument_name: str, argument: Any) -> Any:
    return type(argument) if argument is stand_in() else original(self, argument_name, argument)


@replaces(
    "transformers.models.auto.video_processing_auto:AutoVideoProcessor.from_pretrained",
    why="raises ImportError without torchvision, even if the processor is used only for images",
    when=_loading.get,
)
def from_pretrained(
    original: Original, cls: Any, pretrained_model_name_or_path: Any, *inputs: Any, **kwargs: Any
) -> Any:
    return stand_in()


@contextlib.contextmanager
def without_videos() -> Iterator[None]:
    """Within the context, let this thread load processors without torchvision, with a stand-in for their video part.

    For other threads, and for this thread after the context, transformers is unchanged. Does nothing with torchvision.
    """
    if has_torchvision():
        yield
        return
    from transformers.models.auto import video_processing_auto as _  # noqa: F401 - the patch looks for it

    with _lock:
        patches = PatchSet("transformers", (check_argument, from_pretrained))
        patches.apply_loaded()
        patches.require_essential()
        token = _loading.set(True)
        try:
            yield
        finally:
            _loading.reset(token)
            patches.revert()


@replaces(
    "lmdeploy.vl.model.builder:load_vl_model",
    why="loads processors that need torchvision for videos, though the device refuses videos",
    when=activation.is_on,
    signature="(model_path, backend, with_llm=False, backend_config=None, trust_remote_code=False)",
)
def load_vl_model(original: Original, model_path: str, backend: str, *args: Any, **options: Any) -> Any:
    if backend != "pytorch":
        return original(model_path, backend, *args, **options)
    try:
        with without_videos():
            return original(model_path, backend, *args, **options)
    except DlinferError:
        raise
    except (OSError, ImportError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise ModelFolderError(
            path=model_path,
            detail=f"its image processor is missing or cannot be loaded ({in_short(error)})",
            advice="check that it has preprocessor_config.json, and processor_config.json if the model needs one",
        ) from error


@replaces(
    "lmdeploy.model:HFChatTemplate.__init__",
    why="looks for the chat template in a processor, which needs torchvision for videos",
    when=activation.is_on,
)
def load_chat_template(
    original: Original, self: Any, model_path: str = "", trust_remote_code: bool = False, **kwargs: Any
) -> None:
    with without_videos():
        original(self, model_path, trust_remote_code, **kwargs)


@replaces("lmdeploy.vl.engine:_resolve_mm_feature_dtype", why="does not know float32", when=activation.is_on)
def feature_dtype(original: Original, hf_config: Any, backend_config: Any) -> Any:
    is_wide = getattr(backend_config, "dtype", "auto") == "float32"
    return torch.float32 if is_wide else original(hf_config, backend_config)


def _build_preprocessor(original: Original, self: Any, trust_remote_code: bool = False) -> None:
    with_transforms(original)(self, trust_remote_code)


PATCHES = tuple(
    replaces(
        f"lmdeploy.vl.model.{module}.build_preprocessor",
        why="composes torchvision's transforms, though pillow and torch can compute the same",
        when=lambda: activation.is_on() and not has_torchvision(),
    )(_build_preprocessor)
    for module in ("internvl:InternVLVisionModel", "cogvlm:CogVLMVisionModel", "glm4_v:GLM4VisionModel")
)
