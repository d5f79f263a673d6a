"""Correct Gemma 3 with images: which tokens see which, and the text around images. Correct its and Llama 4's dtype."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.models import image_prompts
from dlinfer.framework.lmdeploy_ext.faults.models.one_position import of_images, spans
from dlinfer.framework.patching import Original

_MODEL = "lmdeploy.pytorch.models.gemma3_vl:Gemma3ForConditionalGeneration"
_LANGUAGE, _VISION = "language_model.", "vision_tower."


@corrects(
    f"{_MODEL}.prepare_attn_masks",
    why="lets the tokens of all images of a prompt see each other, and forgets the cached beginning of a prompt",
)
def _no_masks(
    original: Original, self: Any, input_ids: Any, positions: Any, mask_dtype: Any, **kwargs: Any
) -> dict[str, Any]:
    return kwargs  # attention reads the step's metadata


@corrects(
    f"{_MODEL}.prepare_inputs_for_generation",
    why="does not tell attention where images are, and takes an image token in a text for a part of an image",
)
def _with_images(
    original: Original,
    self: Any,
    past_key_values: Any = None,
    inputs_embeds: Any = None,
    context: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    inputs = original(self, past_key_values, inputs_embeds, context, **kwargs)
    note_images(context)
    if inputs["image_mask"] is not None:
        inputs["image_mask"] = of_images(context, closing=True)[None]
    return inputs


def note_images(context: Any) -> None:
    """Set the fields ``image_...`` of a step's metadata. An image without tokens comes first, for steps without images.

    So one graph serves steps with and without images. A graph's capture knows no strides of an empty tensor.
    """
    meta = context.attn_metadata
    images = [(0, 0, 0, 0)]
    for sequence, (start, history, of_sequence) in enumerate(spans(context)):
        images += [(sequence, begin, end, end - start + history) for begin, end in of_sequence]
    device = meta.block_offsets.device
    meta.image_rows = torch.cat([torch.arange(begin, end, device=device) for _, begin, end, _ in images])
    meta.image_ends = torch.tensor([end - begin for _, begin, end, _ in images]).cumsum(0)
    meta.image_lengths = torch.tensor([length for *_, length in images])
    meta.image_blocks = meta.block_offsets[[sequence for sequence, *_ in images]]


def _marks(model: Any, tokenizer: Any) -> dict[str, Any]:
    names = model.processor.tokenizer
    begin, piece, end = model.processor.boi_token, names.image_token, names.eoi_token

    def written(image: dict[str, Any]) -> str:
        return f"\n\n{begin}{piece * image['image_tokens']}{end}\n\n"

    return {"place": begin, "token": piece, "written": written}


def _dtype_of_the_whole(
    original: Original, cls: Any, hf_config: Any, model_path: str | None = None, **kwargs: Any
) -> Any:
    if hf_config.text_config.dtype is None:
        hf_config.text_config.dtype = hf_config.dtype
    return original(cls, hf_config, model_path, **kwargs)


@corrects(
    f"{_MODEL}.load_weights",
    why="holds all weights of the language model before it loads one, and lacks names that transformers 5 saves",
)
def _load_weights(original: Original, self: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    def of_language() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if name.startswith(_LANGUAGE):
                yield name.removeprefix(_LANGUAGE), weight
            else:
                inside = name.removeprefix(_VISION)
                is_new = inside != name and not inside.startswith("vision_model.")
                original(self, [(f"{_VISION}vision_model.{inside}" if is_new else name, weight)])

    self.language_model.load_weights(of_language())


PATCHES = (
    image_prompts.corrected(
        "lmdeploy.vl.model.gemma3_vl:Gemma3VisionModel.to_pytorch",
        _marks,
        why="leaves out the tokens around an image, puts all images before the text, and drops further texts of a "
        "message",
    ),
    *(
        corrects(
            f"lmdeploy.pytorch.configurations.{builder}.build",
            why="misses a dtype outside text_config, where transformers 5 saves it, and takes float16",
            for_models=(model,),
        )(_dtype_of_the_whole)
        for model, builder in (
            ("gemma3", "gemma:GemmaVLModelConfigBuilder"),
            ("llama4", "llama4:Llama4ModelConfigBuilder"),
        )
    ),
)
