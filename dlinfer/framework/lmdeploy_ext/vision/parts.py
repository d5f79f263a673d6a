"""Split LMDeploy's vision-language models into a language part and a vision part, and compile each to a separate graph.

A model's forward embeds the text, writes image features into the embeddings, and calls the language model. Graph mode
compiles the two parts, each with dynamic sizes. The few operations between them stay eager, so that steps with and
without images run the same graph of the language model.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.faults.models import cogvlm, glm_4v
from dlinfer.framework.lmdeploy_ext.vision import moonvit, towers

Arguments = dict[str, Any]
Sizes = dict[str, tuple[str | None, ...]]
Arrange = Callable[[Any, Arguments], Arguments]


def _unchanged(model: Any, arguments: Arguments) -> Arguments:
    return arguments


@dataclass(frozen=True)
class Parts:
    """The language part and the vision part of a model class.

    language: name of the submodule whose forward computes hidden states from embeddings.
    vision: the vision function, which computes features from pixels, as (path of its submodule, name).
    sizes: argument of the compiled function -> for each dimension a name if it is dynamic, None if it is static.
    example: a function that takes the model, and returns arguments of the vision function for small images.
    tower: a function to compile instead of the vision function, as a method of the same submodule; None compiles the
        vision function itself.
    arrange: a function that takes (model, arguments of the vision function), and returns the arguments of ``tower``.
    restore: a function that takes the result of ``tower``, and returns it in the form of the vision function's result.
    speech: like ``tower``, but for the language part: a function to compile instead of its forward; None compiles the
        forward itself.
    arrange_speech: a function that takes (model, arguments of the language part's forward), and returns the arguments
        of the function that is compiled for the language part.
    speech_sizes: like ``sizes``, for those arguments of the language part that other models do not have.
    """

    language: str
    vision: tuple[str, str]
    sizes: Sizes
    example: Callable[[Any], Arguments]
    tower: Callable[..., Tensor] | None = None
    arrange: Arrange = _unchanged
    restore: Callable[[Tensor], Any] = lambda features: features
    speech: Callable[..., Tensor] | None = None
    arrange_speech: Arrange = _unchanged
    speech_sizes: Sizes = field(default_factory=dict)

    def steady(self, arguments: Arguments) -> list[str]:
        """Return the names of those ``arguments`` of the vision part that have the same value for all images.

        These are the arguments that are not in ``sizes``.
        """
        return [name for name in arguments if name not in self.sizes]


def marks(sizes: Sizes, arguments: Arguments) -> Iterator[tuple[Tensor, int, str | None]]:
    """Yield (tensor, dimension, the dimension's name or None) for each dimension of each argument in ``sizes``.

    An argument is skipped if it is missing or not a tensor. A tuple of tensors counts as several tensors.
    """
    for name, counts in sizes.items():
        value = arguments.get(name)
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, Tensor):
                for dim, counted in enumerate(counts):
                    yield tensor, dim, counted


# --- examples


def _images(weight: Tensor, height: int, width: int) -> Tensor:
    """Return zero pixels of two images, [2, 3, height, width], with weight's dtype and device."""
    return torch.zeros(2, 3, height, width, dtype=weight.dtype, device=weight.device)


def _patches(model: Any) -> tuple[Tensor, Arguments]:
    """Return (grids, int64 [2, 3]; arguments of the encoder) for two example images, of 2 x 2 and 2 x 3 tokens."""
    merge, weight = model.visual.spatial_merge_size, model.visual.patch_embed.proj.weight
    grids = torch.tensor([[1, 2 * merge, 2 * merge], [1, 2 * merge, 3 * merge]])
    counts = grids.prod(1)
    pixels = torch.zeros(int(counts.sum()), weight[0].numel(), dtype=weight.dtype, device=weight.device)
    ends = counts.cumsum(0, dtype=torch.int32).to(pixels.device)
    return grids, {"hidden_states": pixels, "cu_seqlens": ends}


def _rotated(arguments: Arguments, angles: Tensor) -> Arguments:
    wide, pixels = angles.repeat(1, 2), arguments["hidden_states"]
    return arguments | {"rotary_pos_emb": (wide.cos().to(pixels), wide.sin().to(pixels))}


def _qwen2_vl(model: Any) -> Arguments:
    grids, arguments = _patches(model)
    return _rotated(arguments, model.visual.rot_pos_emb(grids))


def _qwen3_vl(model: Any) -> Arguments:
    grids, _ = _patches(model)
    return _qwen2_vl(model) | {"pos_embeds": model.visual.fast_pos_embed_interpolate(grids)}


def _qwen3_5(model: Any) -> Arguments:
    return _qwen3_vl(model.model)


def _glm4v(model: Any) -> Arguments:
    grids, arguments = _patches(model)
    angles, places = model.visual.rot_pos_emb(grids)
    return _rotated(arguments, angles) | {"grid_thw": grids, "image_type_ids": places}


def _qwen2_5_vl(model: Any) -> Arguments:
    grids, arguments = _patches(model)
    pixels = arguments["hidden_states"]
    index, ends = model.visual.get_window_index(grids)
    windows = torch.unique_consecutive(torch.tensor(ends, dtype=torch.int32, device=pixels.device))
    angles = model.visual.rot_pos_emb(grids).to(pixels)
    return arguments | {"rotary_pos_emb": angles, "window_index": index, "cu_window_seqlens": windows}


def _internvl_chat(model: Any) -> Arguments:
    embeddings = model.vision_model.embeddings
    side = embeddings.image_size
    return {"pixel_values": _images(embeddings.class_embedding, side, side)}


def _selected(pixels: Tensor, owner: Any) -> Arguments:
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    return {"pixel_values": pixels, **{name: getattr(owner, name) for name in names}}


def _llava(model: Any) -> Arguments:
    weight = model.vision_tower.vision_model.embeddings.position_embedding.weight
    side = model.config.vision_config.image_size
    return _selected(_images(weight, side, side), model.config)


def _llava_next(model: Any) -> Arguments:
    arguments = _llava(model)
    return {name: arguments[name] for name in ("pixel_values", "vision_feature_layer")}


def _gemma3(model: Any) -> Arguments:
    side, embeddings = model.config.vision_config.image_size, model.vision_tower.vision_model.embeddings
    return {"pixel_values": _images(embeddings.patch_embedding.weight, side, side)}


def _llama4(model: Any) -> Arguments:
    side = model.config.vision_config.image_size
    return {"pixel_values": _images(model.vision_model.class_embedding, side, side)}


def _internvl(model: Any) -> Arguments:
    embeddings = model.vision_tower.embeddings
    return _selected(_images(embeddings.cls_token, *embeddings.image_size), model)


def _square(model: Any) -> Arguments:
    side = model.config.vision_config["image_size"]
    return {"images": _images(next(model.parameters()), side, side)}


# --- models

_VISUAL = ("visual", "forward")
_ROWS = ("hidden_states", "rotary_pos_emb")
_PATCHES: Sizes = {"cu_seqlens": ("images",), **dict.fromkeys(_ROWS, ("patches", None))}
_PLACED = _PATCHES | {"pos_embeds": ("patches", None)}
_PIXELS: Sizes = {
    "cu_seqlens": ("images",),
    "pixel_values": ("patches", None, None, None),
    **dict.fromkeys(("pos_embeds", "rotary_pos_emb"), ("patches", None)),
}
_TOKENS: Sizes = {"cu_seqlens": ("images",), **dict.fromkeys(_ROWS, ("tokens", None, None))}
_TOKENS |= {"window_index": ("tokens",), "cu_window_seqlens": ("windows",)}
_TILES: Sizes = {"pixel_values": ("tiles", None, None, None)}
_IMAGES: Sizes = {"images": ("images", None, None, None)}
_EXPERTS: Sizes = {"lang_ids": ("words",), "vision_ids": ("pieces",)}
_COGVLM = ("model.vision", "forward")
_QWEN3_VL = Parts(
    "language_model",
    _VISUAL,
    _PLACED,
    _qwen3_vl,
    tower=towers.stacked,
    restore=towers.unstacked,
    speech=towers.deepstacked,
    arrange_speech=towers.dense_features,
    speech_sizes={"deepstack": (None, None, "tokens", None)},
)
_QWEN3_5 = Parts("model.language_model", ("model.visual", "forward"), _PLACED, _qwen3_5)

PARTS: dict[str, Parts] = {
    "Qwen2VLForConditionalGeneration": Parts("model", _VISUAL, _PATCHES, _qwen2_vl),
    "Qwen2_5_VLForConditionalGeneration": Parts(
        "model", _VISUAL, _TOKENS, _qwen2_5_vl, towers.windowed, towers.by_token
    ),
    "InternVLForConditionalGeneration": Parts(
        "language_model", ("", "get_image_features"), _TILES, _internvl
    ),
    "InternVLChatModel": Parts("language_model", ("", "extract_feature"), _TILES, _internvl_chat),
    "LlavaForConditionalGeneration": Parts("language_model", ("", "get_image_features"), _TILES, _llava),
    "LlavaNextForConditionalGeneration": Parts(
        "language_model",
        ("vision_tower", "forward"),
        _TILES,
        _llava_next,
        tower=towers.last_hidden_state,
        restore=lambda features: (features,),
    ),
    "Llama4ForConditionalGeneration": Parts("language_model", ("vision_model", "forward"), _TILES, _llama4),
    "Gemma3ForConditionalGeneration": Parts("language_model", ("", "get_image_features"), _TILES, _gemma3),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Glm4vForConditionalGeneration": Parts(
        "language_model", _VISUAL, _PLACED, _glm4v, towers.positioned, towers.with_positions
    ),
    "KimiK25ForConditionalGeneration": Parts(
        "language_model",
        ("", "get_image_features"),
        _PIXELS,
        moonvit.example,
        tower=moonvit.features,
        arrange=moonvit.in_squares,
        restore=lambda features: [features],
    ),
    cogvlm.ARCHITECTURE: Parts(
        "model", _COGVLM, _IMAGES, _square, arrange_speech=cogvlm.with_images, speech_sizes=_EXPERTS
    ),
    glm_4v.CLASS: Parts(
        "transformer", ("transformer.vision", "forward"), _IMAGES, _square, arrange_speech=glm_4v.with_images
    ),
}
"""Maps the name of LMDeploy's model class to its parts. Some classes serve several architectures."""


def of_model(model: nn.Module) -> Parts | None:
    """Return the Parts of a vision-language model; None for other models.

    Also return None for a vision-language model that was loaded without its vision part.
    """
    left_out = any(getattr(module, "_is_dummy_mod", False) for module in model.modules())
    parts = None if left_out else PARTS.get(type(model).__name__)
    if parts is None or parts.vision[0] not in dict(model.named_modules()):  # ChatGLM without images
        return None
    return parts


def vision_function(model: nn.Module, parts: Parts) -> tuple[Any, Callable[..., Any]]:
    """Return (submodule, bound method): the method computes features from pixels, and belongs to the submodule."""
    path, name = parts.vision
    owner: Any = model.get_submodule(path)
    return owner, getattr(owner, name)


def method(
    written: Callable[..., Any] | None, owner: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the callable to compile: ``written``, bound to ``owner``; or ``function`` if ``written`` is None."""
    return function if written is None else MethodType(written, owner)


def named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
