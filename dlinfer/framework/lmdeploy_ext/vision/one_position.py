"""Models in which all pieces of an image have one position: CogVLM and GLM-4V.

Later positions fall behind the number of tokens. Where the images of a sequence end, and by how much, is kept with it
between its steps: a sequence that was evicted is computed again from its beginning, or from blocks that others share.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Patch


def pixels(context: Any) -> Tensor | None:
    """Pixels of a step's images, [images, 3, side, side]; None where it has none. context: LMDeploy's, of a step."""
    given = [image for inputs in context.input_multimodals or () for image in (inputs or {}).get("image", [])]
    return torch.stack([image.data for image in given]) if given else None


def of_images(context: Any, closing: bool) -> Tensor:
    """bool [tokens of the step]: which are an image's. closing: whether the last token of each counts."""
    seen = torch.zeros(context.input_ids.shape[1], dtype=torch.bool)
    for _, _, spans in _spans(context):
        for begin, end in spans:
            seen[begin : end if closing else end - 1] = True
    return seen.to(context.input_ids.device)


def _spans(context: Any) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """For each sequence: (place in the step of its first token, tokens before, (begin, end) of images in the step)."""
    starts = context.q_start_loc.tolist()
    histories = (context.kv_seqlens - context.q_seqlens).tolist()
    given = context.input_multimodals or [None] * len(starts)
    for start, history, inputs in zip(starts, histories, given, strict=False):
        images = (inputs or {}).get("image", [])
        move = start - history
        yield start, history, sorted((image.start + move, image.end + move) for image in images)


def _metas(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_model_metas(
        self: Any, past_key_values: Any, inputs_embeds: Tensor | None = None, context: Any = None
    ) -> list[dict[str, dict[int, int]]]:
        if activation.active() is None or not hasattr(self.config, "vision_config"):
            return original(self, past_key_values, inputs_embeds, context)
        positions = context.position_ids.clone()
        lengths = context.q_seqlens.tolist()
        given = context.model_metas or [None] * len(lengths)
        metas = []
        for length, meta, (start, history, spans) in zip(lengths, given, _spans(context), strict=False):
            shared: dict[int, int] = dict((meta or {}).get("images", {}))  # end of an image -> pieces but one
            positions[0, start : start + length] -= sum(n for end, n in shared.items() if end <= history)
            for begin, end in spans:
                pieces = end - begin - 2
                own = positions[0, begin : start + length]
                own[1 : pieces + 1] = own[1].clone()
                own[pieces + 1 :] -= pieces - 1
                shared[end - start + history] = pieces - 1
            metas.append({"images": shared})
        context.position_ids = positions
        return metas

    return update_model_metas


PATCHES = tuple(
    Patch(
        target=f"lmdeploy.pytorch.models.{model}.update_model_metas",
        why="splits positions by a tensor of lengths, and counts an evicted sequence's images twice",
        signature="(self, past_key_values, inputs_embeds=None, context=None)",
        build=_metas,
        versions=FAULTY,
    )
    for model in ("cogvlm:CogVLMForCausalLM", "chatglm2:ChatGLMForConditionalGeneration")
)
