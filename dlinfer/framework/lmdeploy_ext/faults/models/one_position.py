"""Compute the positions of tokens in CogVLM and GLM-4V, where all patch tokens of an image share one position.

Tokens after an image therefore have a position below their index. For each sequence we store a dict: index of an
image's end -> how much the image lowers later positions. If an evicted sequence is computed again, the same index is
written again, and so no image is counted twice.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


def pixels(context: Any) -> Tensor | None:
    """Return the pixels of the images in a StepContext, [images, 3, side, side]; None without images."""
    inputs = filter(None, context.input_multimodals or ())
    images = [image.data for of_sequence in inputs for image in of_sequence.get("image", [])]
    return torch.stack(images) if images else None


def of_images(context: Any, closing: bool) -> Tensor:
    """Return a mask, bool [tokens], that is true for the tokens of images in this step.

    context: the step's StepContext. closing: whether the mask is true for the last token of an image too.
    """
    seen = torch.zeros(context.input_ids.shape[1], dtype=torch.bool)
    for _, _, images in spans(context):
        for begin, end in images:
            seen[begin : end if closing else end - 1] = True
    return seen.to(context.input_ids.device)


def spans(context: Any) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield (start, history, spans) for each sequence of a step.

    start: index in the step of the sequence's first new token. history: number of the sequence's cached tokens.
    spans: (begin, end) of each image of the sequence, as indices in the step.
    """
    starts = context.q_start_loc.tolist()
    histories = (context.kv_seqlens - context.q_seqlens).tolist()
    multimodals = context.input_multimodals or [None] * len(starts)
    for start, history, inputs in zip(starts, histories, multimodals, strict=False):
        move = start - history
        images = (inputs or {}).get("image", [])
        yield start, history, sorted((image.start + move, image.end + move) for image in images)


def _update_model_metas(
    original: Original, self: Any, past_key_values: Any, inputs_embeds: Any = None, context: Any = None
) -> list[dict[str, dict[int, int]]]:
    if not hasattr(self.config, "vision_config"):
        return original(self, past_key_values, inputs_embeds, context)
    positions = context.position_ids.clone()
    lengths = context.q_seqlens.tolist()
    before = context.model_metas or [None] * len(lengths)
    metas = []
    for length, meta, (start, history, images) in zip(lengths, before, spans(context), strict=False):
        shared: dict[int, int] = dict(
            (meta or {}).get("images", {})
        )  # end of an image -> its patch tokens - 1
        positions[0, start : start + length] -= sum(n for end, n in shared.items() if end <= history)
        for begin, end in images:
            pieces = end - begin - 2
            own = positions[0, begin : start + length]
            own[1 : pieces + 1] = own[1].clone()
            own[pieces + 1 :] -= pieces - 1
            shared[end - start + history] = pieces - 1
        metas.append({"images": shared})
    context.position_ids = positions
    return metas


PATCHES = tuple(
    corrects(
        f"lmdeploy.pytorch.models.{model}.update_model_metas",
        why="splits positions by a tensor, which torch.split refuses, and counts an evicted sequence's images twice",
    )(_update_model_metas)
    for model in ("cogvlm:CogVLMForCausalLM", "chatglm2:ChatGLMForConditionalGeneration")
)
