"""Functions that replace forwards of LMDeploy's vision models, so that one graph serves images of all sizes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def by_token(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of Qwen2.5-VL's encoder, and return those of ``windowed``.

    Patches [patches, size] become [tokens, patches of a token, size]. Otherwise a graph would have two unrelated
    dynamic sizes, the number of patches and the number of tokens.
    """
    unit = model.visual.spatial_merge_unit
    split = {name: arguments[name].unflatten(0, (-1, unit)) for name in ("hidden_states", "rotary_pos_emb")}
    return arguments | split


def windowed(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    rotary_pos_emb: Tensor,
    window_index: Tensor,
    cu_window_seqlens: Tensor,
) -> Tensor:
    """Run Qwen2.5-VL's encoder: attention is within windows, but over whole images in some layers.

    self: LMDeploy's module. hidden_states: pixels [tokens, unit, pixels of a patch], where unit is the number of
    patches of a token. rotary_pos_emb: angles [tokens, unit, head size / 2]. window_index: [tokens], the tokens in the
    order of windows. cu_seqlens: [images], where each image's patches end. cu_window_seqlens: [windows + 1]. Returns
    features in the order of the images, [tokens, hidden].
    """
    tokens, unit, _ = hidden_states.shape
    patches = self.patch_embed(hidden_states.flatten(0, 1))
    x = patches.reshape(tokens, unit, -1)[window_index].flatten(0, 1)
    angles = rotary_pos_emb[window_index].flatten(0, 1).repeat(1, 2)
    tables = (angles.cos(), angles.sin())
    whole = pad(cu_seqlens, (1, 0))
    for number, block in enumerate(self.blocks):
        ends = whole if number in self.fullatt_block_indexes else cu_window_seqlens
        x = block(x, cu_seqlens=ends, rotary_pos_emb=tables)
    return self.merger(x)[window_index.argsort()]


def last_hidden_state(self: Any, pixel_values: Tensor, vision_feature_layer: int) -> Tensor:
    """Run LLaVA-NeXT's encoder. Return the hidden states of one layer, [tiles, tokens, hidden].

    self: LMDeploy's module. pixel_values: [tiles, 3, side, side].
    """
    return type(self).forward(self, pixel_values, vision_feature_layer=vision_feature_layer)[0]


def stacked(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    rotary_pos_emb: tuple[Tensor, Tensor],
    pos_embeds: Tensor,
) -> Tensor:
    """Run Qwen3-VL's encoder. Return its features, then those of lower layers: [1 + layers, tokens, hidden]."""
    features, lower = type(self).forward(self, hidden_states, cu_seqlens, rotary_pos_emb, pos_embeds)
    return torch.stack([features, *lower])


def unstacked(features: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Take the result of ``stacked``, and return it in the form of Qwen3-VL's own encoder."""
    return features[0], list(features[1:])


def dense_features(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of Qwen3-VL's language model, and return those of ``deepstacked``.

    The image features of the lower layers come without the text tokens between images. They become one tensor,
    ``deepstack`` [layers, 1, tokens, hidden], with zeros for text tokens. A prefill without images gets only zeros, so
    the same graph serves prefills with and without images.
    """
    mask, lower = arguments.pop("visual_pos_masks", None), arguments.pop("deepstack_visual_embeds", None)
    for name in ("input_ids", "all_routed_experts"):  # the latter belongs to models with experts, and is None
        arguments.pop(name, None)
    embeds = arguments["inputs_embeds"]
    if lower is None and arguments["attn_metadata"].is_decoding:
        return arguments
    layers = len(model.visual.deepstack_visual_indexes)
    dense = embeds.new_zeros(layers, *embeds.shape)
    for place, features in zip(dense, lower or (), strict=False):
        place.masked_scatter_(mask, features.to(dense))
    return arguments | {"deepstack": dense}


def deepstacked(
    self: Any,
    position_ids: Tensor,
    past_key_values: Any,
    attn_metadata: Any,
    inputs_embeds: Tensor,
    mrope_position_ids: Tensor | None = None,
    deepstack: Tensor | None = None,
) -> Tensor:
    """Run Qwen3-VL's language model, and add image features to the hidden states after each of the lowest layers.

    self: LMDeploy's module. inputs_embeds: [1, tokens, hidden]. deepstack: the features, [layers, 1, tokens, hidden],
    or None. Other arguments are LMDeploy's. Returns hidden states, [1, tokens, hidden].
    """
    positions = position_ids if mrope_position_ids is None else mrope_position_ids.unsqueeze(1)
    cos, sin = self.rotary_emb(inputs_embeds, positions)
    tables = (cos[0], sin[0])
    x, residual = inputs_embeds, None
    for number, layer in enumerate(self.layers):
        x, residual = layer(
            x,
            rotary_pos_emb=tables,
            past_key_value=past_key_values[number],
            residual=residual,
            attn_metadata=attn_metadata,
        )
        if deepstack is not None and number < deepstack.shape[0]:
            x, residual = x + residual + deepstack[number], None
    return self.norm(x) if residual is None else self.norm(x, residual)[0]


def with_positions(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of GLM-4.1V's encoder, and return those of ``positioned``.

    The position embeddings are resampled for each image's shape, and one graph for all shapes cannot do that. So
    LMDeploy's own function resamples them here, outside the graph. It adds the embeddings to the tensor that it gets:
    here to zeros, so that the result is the embeddings alone.
    """
    grids, places = arguments.pop("grid_thw"), arguments.pop("image_type_ids")
    weight = model.visual.embeddings.position_embedding.weight
    lengths = torch.diff(arguments["cu_seqlens"], prepend=arguments["cu_seqlens"].new_zeros(1)).tolist()
    zeros = weight.new_zeros(len(places), weight.shape[1])
    positions = model.visual.embeddings(zeros, lengths, grids, places[:, 0], places[:, 1])
    return arguments | {"pos_embeds": positions}


def positioned(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    rotary_pos_emb: tuple[Tensor, Tensor],
    pos_embeds: Tensor,
) -> Tensor:
    """Run GLM-4.1V's encoder with position embeddings as an argument. Return features, [tokens, hidden].

    self: LMDeploy's module. hidden_states: pixels [patches, pixels of a patch]. cu_seqlens: [images], where each
    image's patches end. rotary_pos_emb: cos and sin, [patches, head size] each. pos_embeds: [patches, width].
    """
    x, residual = self.post_conv_layernorm(self.patch_embed(hidden_states)) + pos_embeds, None
    ends = pad(cu_seqlens, (1, 0))
    for block in self.blocks:
        x, residual = block(x, cu_seqlens=ends, rotary_pos_emb=rotary_pos_emb, residual=residual)
    x = self.post_layernorm(x if residual is None else x + residual)
    side = self.spatial_merge_size
    squares = x.view(-1, side, side, x.shape[-1]).permute(0, 3, 1, 2)
    return self.merger(self.downsample(squares).flatten(1))
