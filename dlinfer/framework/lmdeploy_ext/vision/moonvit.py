"""Kimi-K2.5's vision part (MoonViT and its projector) as one function of tensors, so that one graph serves all sizes.

LMDeploy loops over the images: it resamples position embeddings for each shape, attends within each image, and merges
squares of patches. ``in_squares`` prepares all that depends on shapes, and sorts the patches by square; ``features`` is
then the same for all shapes. The order of an image's patches changes nothing, because each has its own position.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer import ops


def example(model: Any) -> dict[str, Tensor]:
    """Return arguments of ``get_image_features`` for two images, of 2 x 2 and 2 x 3 tokens. model: LMDeploy's."""
    tower = model.vision_tower
    high, wide = tower.merge_kernel_size
    grids = torch.tensor([[1, 2 * high, 2 * wide], [1, 2 * high, 3 * wide]])
    weight = tower.patch_embed.proj.weight
    patches = weight.new_zeros(int(grids.prod(1).sum()), *weight.shape[1:])
    return {"pixel_values": patches, "grid_thws": grids}


def in_squares(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of ``get_image_features``, and return those of ``features``. model: LMDeploy's."""
    tower, grids = model.vision_tower, arguments["grid_thws"]
    embed, pixels = tower.patch_embed, arguments["pixel_values"]
    order = _order(grids, *tower.merge_kernel_size).to(pixels.device)
    zeros = embed.proj.weight.new_zeros(pixels.shape[0], embed.pos_emb.dim)
    angles = tower.encoder.rope_2d.get_freqs_cis(grids, pixels.device)[order]
    return {
        "pixel_values": pixels[order].to(embed.proj.weight.dtype),
        "pos_embeds": embed.pos_emb(zeros, grids)[order],
        "rotary_pos_emb": (angles.real.contiguous(), angles.imag.contiguous()),
        "cu_seqlens": grids.prod(1).cumsum(0, dtype=torch.int32).to(pixels.device),
    }


def _order(grids: Tensor, high: int, wide: int) -> Tensor:
    """Return int64 [patches], the patches of each image (rows of its grid) sorted by squares of high x wide patches."""
    orders, begin = [], 0
    for _, rows, columns in grids.tolist():
        own = torch.arange(begin, begin + rows * columns)
        orders.append(own.view(rows // high, high, columns // wide, wide).transpose(1, 2).flatten())
        begin += rows * columns
    return torch.cat(orders)


def features(
    self: Any,
    pixel_values: Tensor,
    pos_embeds: Tensor,
    rotary_pos_emb: tuple[Tensor, Tensor],
    cu_seqlens: Tensor,
) -> Tensor:
    """Run the encoder and the projector. Return features, [tokens, hidden size of the language model].

    self: LMDeploy's model. pixel_values: [patches, 3, side, side], the patches of a token one after another.
    pos_embeds: [patches, width]. rotary_pos_emb: cos and sin, float32 [patches, head size / 2] each. cu_seqlens:
    [images], where each image's patches end.
    """
    tower = self.vision_tower
    x = tower.patch_embed.proj(pixel_values).flatten(1) + pos_embeds
    lengths = torch.diff(cu_seqlens, prepend=cu_seqlens.new_zeros(1))
    for block in tower.encoder.blocks:
        x = x + _attention(block, block.norm0(x), rotary_pos_emb, cu_seqlens, lengths)
        x = x + block.mlp(block.norm1(x))
    projector = self.mm_projector
    x = projector.pre_norm(tower.encoder.final_layernorm(x))
    return projector.proj(x.view(-1, projector.hidden_size))


def _attention(block: Any, x: Tensor, tables: tuple[Tensor, Tensor], ends: Tensor, lengths: Tensor) -> Tensor:
    heads, size = block.num_heads, block.hidden_size_per_attention_head
    q, k, v = block.wqkv(x).view(-1, 3, heads, size).unbind(1)
    cos, sin = (table[:, None] for table in tables)
    q, k = (ops.apply_rotary_pos_emb_interleaved(x.float(), cos, sin, False).to(x.dtype) for x in (q, k))
    out = ops.prefill_attention(
        q,
        k,
        v,
        None,
        None,
        lengths,
        lengths,
        x.shape[0],
        heads,
        heads,
        softmax_scale=size**-0.5,
        actual_seq_lengths_cpu=ends.cpu(),
        head_size_v=size,
        causal=False,
    )
    return block.wo(out.flatten(1))
