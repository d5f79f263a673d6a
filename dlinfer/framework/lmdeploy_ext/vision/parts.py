"""Which parts of LMDeploy's vision-language models are language and which are vision, and what the latter take.

A model's forward embeds the text, puts features of images in their places and hands all of it to the language model.
Graph mode compiles these two parts, each for all sizes; the few operations between them stay as they are, so that a
step with images runs the same graph of the language model as one without.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.vision import cogvlm, towers

Sizes = dict[str, tuple[str | None, ...]]
Arrange = Callable[[Any, dict[str, Any]], dict[str, Any]]


def _as_it_is(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    return given


@dataclass(frozen=True)
class Parts:
    """Of one class of models.

    language: name of the submodule whose forward makes hidden states from embeddings.
    vision: the owner of the function that makes features from pixels, as a path from the model, and its name.
    sizes: argument of what is compiled -> what each of its dimensions counts; None is the same for all images.
    example: makes arguments of the function for small images, from the model.
    tower: what is compiled in the function's place, as a method of its owner; None is the function itself.
    arrange: makes the arguments of ``tower`` from (model, the function's). restore: the function's result from its.
    speech, arrange_speech, speech_sizes: the same of the language part, for arguments that other models do not have.
    """

    language: str
    vision: tuple[str, str]
    sizes: Sizes
    example: Callable[[Any], dict[str, Any]]
    tower: Callable[..., Tensor] | None = None
    arrange: Arrange = _as_it_is
    restore: Callable[[Tensor], Any] = lambda made: made
    speech: Callable[..., Tensor] | None = None
    arrange_speech: Arrange = _as_it_is
    speech_sizes: Sizes = field(default_factory=dict)

    def steady(self, given: dict[str, Any]) -> list[str]:
        """The arguments of the vision part that are no tensors, and are the same for all images."""
        return [name for name in given if name not in self.sizes]


def marks(sizes: Sizes, given: dict[str, Any]) -> Iterator[tuple[Tensor, int, str | None]]:
    """(tensor, dimension, what it counts) for every dimension of these arguments, where they are there."""
    for name, counts in sizes.items():
        value = given.get(name)
        tensors = value if isinstance(value, tuple) else (value,)
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for dim, counted in enumerate(counts):
                    yield tensor, dim, counted


def _grids(model: Any) -> Tensor:
    """Two images, of 2 x 2 and 2 x 3 tokens: int64 [2, 3]."""
    merge = model.visual.spatial_merge_size
    return torch.tensor([[1, 2 * merge, 2 * merge], [1, 2 * merge, 3 * merge]])


def _patches(model: Any, grids: Tensor) -> Tensor:
    embed = model.visual.patch_embed
    weight = embed.proj.weight
    return torch.zeros(int(grids.prod(1).sum()), weight[0].numel(), dtype=weight.dtype, device=weight.device)


def _ends(grids: Tensor, device: torch.device) -> Tensor:
    return grids.prod(1).cumsum(0, dtype=torch.int32).to(device)


def _qwen2_vl(model: Any) -> dict[str, Any]:
    grids = _grids(model)
    pixels = _patches(model, grids)
    angles = model.visual.rot_pos_emb(grids).repeat(1, 2)
    return {
        "hidden_states": pixels,
        "cu_seqlens": _ends(grids, pixels.device),
        "rotary_pos_emb": (angles.cos().to(pixels), angles.sin().to(pixels)),
    }


def _internvl_chat(model: Any) -> dict[str, Any]:
    embeddings = model.vision_model.embeddings
    weight, side = embeddings.class_embedding, embeddings.image_size
    return {"pixel_values": torch.zeros(2, 3, side, side, dtype=weight.dtype, device=weight.device)}


def _qwen3_vl(model: Any) -> dict[str, Any]:
    positions = model.visual.fast_pos_embed_interpolate(_grids(model))
    return _qwen2_vl(model) | {"pos_embeds": positions}


def _glm4v(model: Any) -> dict[str, Any]:
    grids = _grids(model)
    pixels = _patches(model, grids)
    angles, places = model.visual.rot_pos_emb(grids)
    angles = angles.repeat(1, 2)
    return {
        "hidden_states": pixels,
        "cu_seqlens": _ends(grids, pixels.device),
        "rotary_pos_emb": (angles.cos().to(pixels), angles.sin().to(pixels)),
        "grid_thw": grids,
        "image_type_ids": places,
    }


def _qwen2_5_vl(model: Any) -> dict[str, Any]:
    grids = _grids(model)
    pixels = _patches(model, grids)
    index, ends = model.visual.get_window_index(grids)
    windows = torch.unique_consecutive(torch.tensor(ends, dtype=torch.int32, device=pixels.device))
    return {
        "hidden_states": pixels,
        "cu_seqlens": _ends(grids, pixels.device),
        "rotary_pos_emb": model.visual.rot_pos_emb(grids).to(pixels),
        "window_index": index,
        "cu_window_seqlens": windows,
    }


def _llava(model: Any) -> dict[str, Any]:
    config = model.config
    weight = model.vision_tower.vision_model.embeddings.position_embedding.weight
    side = config.vision_config.image_size
    return {
        "pixel_values": torch.zeros(2, 3, side, side, dtype=weight.dtype, device=weight.device),
        "vision_feature_layer": config.vision_feature_layer,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }


def _internvl(model: Any) -> dict[str, Any]:
    embeddings = model.vision_tower.embeddings
    weight = embeddings.cls_token
    pixels = torch.zeros(2, 3, *embeddings.image_size, dtype=weight.dtype, device=weight.device)
    return {
        "pixel_values": pixels,
        "vision_feature_layer": model.vision_feature_layer,
        "vision_feature_select_strategy": model.vision_feature_select_strategy,
    }


def _cogvlm(model: Any) -> dict[str, Any]:
    weight, side = model.model.vision.boi, model.config.vision_config["image_size"]
    return {"images": torch.zeros(2, 3, side, side, dtype=weight.dtype, device=weight.device)}


PARTS: dict[str, Parts] = {
    "Qwen2VLForConditionalGeneration": Parts(
        "model",
        ("visual", "forward"),
        {
            "hidden_states": ("patches", None),
            "cu_seqlens": ("images",),
            "rotary_pos_emb": ("patches", None),
        },
        _qwen2_vl,
    ),
    "Qwen2_5_VLForConditionalGeneration": Parts(
        "model",
        ("visual", "forward"),
        {
            "hidden_states": ("tokens", None, None),
            "cu_seqlens": ("images",),
            "rotary_pos_emb": ("tokens", None, None),
            "window_index": ("tokens",),
            "cu_window_seqlens": ("windows",),
        },
        _qwen2_5_vl,
        towers.windowed,
        towers.by_token,
    ),
    "InternVLForConditionalGeneration": Parts(
        "language_model",
        ("", "get_image_features"),
        {"pixel_values": ("tiles", None, None, None)},
        _internvl,
    ),
    "InternVLChatModel": Parts(
        "language_model",
        ("", "extract_feature"),
        {"pixel_values": ("tiles", None, None, None)},
        _internvl_chat,
    ),
    "LlavaForConditionalGeneration": Parts(
        "language_model",
        ("", "get_image_features"),
        {"pixel_values": ("images", None, None, None)},
        _llava,
    ),
    "Qwen3VLForConditionalGeneration": Parts(
        "language_model",
        ("visual", "forward"),
        {
            "hidden_states": ("patches", None),
            "cu_seqlens": ("images",),
            "rotary_pos_emb": ("patches", None),
            "pos_embeds": ("patches", None),
        },
        _qwen3_vl,
        tower=towers.stacked,
        restore=towers.unstacked,
        speech=towers.deepstacked,
        arrange_speech=towers.dense_features,
        speech_sizes={"deepstack": (None, None, "tokens", None)},
    ),
    "Glm4vForConditionalGeneration": Parts(
        "language_model",
        ("visual", "forward"),
        {
            "hidden_states": ("patches", None),
            "cu_seqlens": ("images",),
            "rotary_pos_emb": ("patches", None),
            "pos_embeds": ("patches", None),
        },
        _glm4v,
        towers.positioned,
        towers.with_positions,
    ),
    cogvlm.ARCHITECTURE: Parts(
        "model",
        ("model.vision", "forward"),
        {"images": ("images", None, None, None)},
        _cogvlm,
        arrange_speech=cogvlm.with_images,
        speech_sizes={"lang_ids": ("words",), "vision_ids": ("pieces",)},
    ),
}
"""Class of LMDeploy's -> its parts."""


def of_model(model: nn.Module) -> Parts | None:
    """The parts of a vision-language model; None for any other, and where its vision part was left out."""
    left_out = any(getattr(module, "_is_dummy_mod", False) for module in model.modules())
    return None if left_out else PARTS.get(type(model).__name__)


def vision_function(model: nn.Module, parts: Parts) -> tuple[Any, Callable[..., Any]]:
    """(owner, the bound function) that makes features from pixels."""
    path, name = parts.vision
    owner: Any = model.get_submodule(path)
    return owner, getattr(owner, name)


def method(
    written: Callable[..., Any] | None, owner: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """What is compiled: ``function``, or what is written for its place, as a method of its owner."""
    return function if written is None else MethodType(written, owner)


def named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
