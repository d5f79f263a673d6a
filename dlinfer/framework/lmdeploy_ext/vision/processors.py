"""Processors of images where torchvision is not installed: there is no build of it for every torch, least for CPUs.

transformers 5 has each image processor twice, on torchvision and on pillow with numpy, and takes the second by itself.
Processors that know videos too want torchvision nevertheless, for the video part, which is a stand-in here: a message
with a video is refused before it gets there.
"""

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from dlinfer.errors import DlinferError, ModelFolderError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse
from dlinfer.framework.lmdeploy_ext.vision.transforms import with_transforms
from dlinfer.framework.patching import Patch, PatchSet

_loading: ContextVar[bool] = ContextVar("dlinfer_loads_a_processor", default=False)
_lock = threading.RLock()


def has_torchvision() -> bool:
    """Whether torchvision is installed, as transformers asks."""
    return importlib.util.find_spec("torchvision") is not None


@functools.cache
def stand_in() -> Any:
    """A video processor that refuses every video."""
    from transformers.video_processing_utils import VideoProcessorMixin

    class NoVideos(VideoProcessorMixin):
        """Stands where a processor wants one for videos."""

        def __call__(self, videos: Any, **kwargs: Any) -> Any:
            raise refuse("video input without torchvision", "send single images of the video")

    return NoVideos()


def _from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *inputs: Any, **kwargs: Any) -> Any:
        if _loading.get():
            return stand_in()
        return original(cls, pretrained_model_name_or_path, *inputs, **kwargs)

    return from_pretrained


def _check_argument(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check_argument_for_proper_class(self: Any, argument_name: str, argument: Any) -> Any:
        if _loading.get() and argument is stand_in():
            return type(argument)
        return original(self, argument_name, argument)

    return check_argument_for_proper_class


_VIDEO_PROCESSORS = (
    Patch(
        target="transformers.processing_utils:ProcessorMixin.check_argument_for_proper_class",
        why="finds the class of video processors in no module without torchvision",
        signature="(self, argument_name, argument)",
        build=_check_argument,
    ),
    Patch(
        target="transformers.models.auto.video_processing_auto:AutoVideoProcessor.from_pretrained",
        why="raises ImportError without torchvision, for processors that are asked for images alone",
        signature="(cls, pretrained_model_name_or_path, *inputs, **kwargs)",
        build=_from_pretrained,
    ),
)


@contextlib.contextmanager
def without_videos() -> Iterator[None]:
    """Where torchvision is missing, let this thread load processors without their part for videos.

    transformers is as it was for every other thread, and for this one afterwards.
    """
    if has_torchvision():
        yield
        return
    from transformers.models.auto import video_processing_auto as _  # noqa: F401 - the patch looks for it

    with _lock:
        patches = PatchSet("transformers", _VIDEO_PROCESSORS)
        patches.apply_loaded()
        patches.require_essential()
        token = _loading.set(True)
        try:
            yield
        finally:
            _loading.reset(token)
            patches.revert()


def _load_vl_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_vl_model(
        model_path: str,
        backend: str,
        with_llm: bool = False,
        backend_config: Any = None,
        trust_remote_code: bool = False,
    ) -> Any:
        if activation.active() is None or backend != "pytorch":
            return original(model_path, backend, with_llm, backend_config, trust_remote_code)
        try:
            with without_videos():
                return original(model_path, backend, with_llm, backend_config, trust_remote_code)
        except DlinferError:
            raise
        except (OSError, ImportError, KeyError, AttributeError, TypeError, ValueError) as error:
            lines = str(error).strip().splitlines() or [""]
            raise ModelFolderError(
                path=model_path,
                detail=f"its image processor is missing or cannot be loaded ({type(error).__name__}: {lines[0]})",
                advice="see that preprocessor_config.json is there, and processor_config.json where the model has one",
            ) from error

    return load_vl_model


def _chat_template(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, model_path: str = "", trust_remote_code: bool = False, **kwargs: Any) -> None:
        if activation.active() is None:
            original(self, model_path, trust_remote_code, **kwargs)
            return
        with without_videos():
            original(self, model_path, trust_remote_code, **kwargs)

    return __init__


def _feature_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _resolve_mm_feature_dtype(hf_config: Any, backend_config: Any) -> Any:
        if activation.active() is not None and getattr(backend_config, "dtype", "auto") == "float32":
            return torch.float32
        return original(hf_config, backend_config)

    return _resolve_mm_feature_dtype


def _transforms(original: Callable[..., None]) -> Callable[..., None]:
    own = with_transforms(original)

    @functools.wraps(original)
    def build_preprocessor(self: Any, trust_remote_code: bool = False) -> None:
        build = original if activation.active() is None or has_torchvision() else own
        build(self, trust_remote_code)

    return build_preprocessor


PATCHES = (
    *(
        Patch(
            target=f"lmdeploy.vl.model.{module}.build_preprocessor",
            why="composes transforms of torchvision's that pillow and torch have as well",
            signature="(self, trust_remote_code=False)",
            build=_transforms,
        )
        for module in ("internvl:InternVLVisionModel", "cogvlm:CogVLMVisionModel")
    ),
    Patch(
        target="lmdeploy.vl.model.builder:load_vl_model",
        why="loads processors that want torchvision for videos, which nobody may send",
        signature="(model_path, backend, with_llm=False, backend_config=None, trust_remote_code=False)",
        build=_load_vl_model,
    ),
    Patch(
        target="lmdeploy.model:HFChatTemplate.__init__",
        why="looks for the chat template in a processor, which wants torchvision for videos",
        signature="(self, model_path='', trust_remote_code=False, **kwargs)",
        build=_chat_template,
    ),
    Patch(
        target="lmdeploy.vl.engine:_resolve_mm_feature_dtype",
        why="knows no float32",
        signature="(hf_config, backend_config)",
        build=_feature_dtype,
    ),
)
