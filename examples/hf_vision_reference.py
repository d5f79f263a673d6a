"""What Hugging Face transformers says of images: greedy tokens of chats, and what its processor makes of them.

For a process of its own, as ``hf_reference.py``, whose rules hold here too. A job is::

    {"chats": [[{"role": "user", "content": [{"type": "image", "url": DATA_URL}, {"type": "text", "text": ...}]}], ...],
     "max_new_tokens": 10}

For chat i ``run`` gives ``prompt_i``, ``tokens_i`` and ``gap_i``, as ``hf_reference.py`` does for prompts, and
``pixels_i``, the processor's ``pixel_values`` of all its images, where there are any.
"""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor, GenerationConfig, processing_utils
from transformers.models.auto import video_processing_auto
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import VideoProcessorMixin

from .hf_reference import end_tokens, forget


class _NoVideos(VideoProcessorMixin):
    """Processors want a part for videos, which needs torchvision. No job has a video."""


class _NoVideoProcessors:
    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> VideoProcessorMixin:
        return _NoVideos()


def load_processor(folder: Path) -> Any:
    """transformers' own processor of a checkpoint, without its part for videos where torchvision is missing."""
    if not is_torchvision_available():
        video_processing_auto.AutoVideoProcessor = _NoVideoProcessors
        vars(processing_utils.transformers_module)["VideoProcessorMixin"] = VideoProcessorMixin
    return AutoProcessor.from_pretrained(folder)


def image_of(url: str) -> Image.Image:
    """The picture in a data URL."""
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")


def with_images(chat: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """(the chat as a template reads it, its pictures in order)."""
    pictures = []
    messages = []
    for message in chat:
        content = message["content"]
        if not isinstance(content, str):
            pictures += [image_of(part["url"]) for part in content if part["type"] == "image"]
            content = [{k: v for k, v in part.items() if k != "url"} for part in content]
        messages.append(message | {"content": content})
    return messages, pictures


@torch.inference_mode()
def answer(
    model: Any, processor: Any, chat: list[dict[str, Any]], new: int, ends: list[int]
) -> dict[str, np.ndarray]:
    """Prompt, tokens, gaps and pixels of one chat."""
    messages, pictures = with_images(chat)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
    if pictures:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)  # Llama 4's processor makes bfloat16
    plain = GenerationConfig(
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    model.generation_config = plain
    forget(model)
    out = model.generate(**inputs, generation_config=plain)
    prompt = inputs["input_ids"][0]
    best = torch.cat(out.scores).float().topk(2, dim=-1).values
    found = {
        "prompt": prompt.numpy(),
        "tokens": out.sequences[0, len(prompt) :].numpy(),
        "gap": (best[:, 0] - best[:, 1]).numpy(),
    }
    if pictures:
        pixels = inputs["pixel_values"].float()
        if pixels.ndim == 5:  # LLaVA-NeXT's tiles, with zeros where an image has less than others
            pixels = pixels.flatten(0, 1)
            pixels = pixels[pixels.flatten(1).any(1)]
        found["pixels"] = pixels.numpy()
    return found


def run(model_folder: Path, job: dict[str, Any], processor: Any = None) -> dict[str, np.ndarray]:
    """Answer a job (see the module's docstring). processor: in place of the checkpoint's own."""
    model = AutoModelForMultimodalLM.from_pretrained(model_folder, dtype=job.get("dtype", "auto")).eval()
    model = getattr(model, "thinker", model)  # Qwen3-Omni's part that writes text
    processor = processor or load_processor(model_folder)
    ends = end_tokens(model, processor.tokenizer)
    arrays = {"dtype": np.array(str(model.dtype).removeprefix("torch."))}
    for i, chat in enumerate(job["chats"]):
        found = answer(model, processor, chat, job["max_new_tokens"], ends)
        arrays |= {f"{name}_{i}": values for name, values in found.items()}
    return arrays
