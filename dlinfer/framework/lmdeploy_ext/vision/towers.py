"""Vision encoders of LMDeploy's whose forward no graph can hold for images of all sizes, written so that one can."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad


def by_token(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``windowed`` from those of Qwen2.5-VL's encoder: patches become [tokens, patches of a token, size].

    How many patches there are then follows from how many tokens, which a graph could not know of two sizes.
    """
    unit = model.visual.spatial_merge_unit
    split = {name: given[name].unflatten(0, (-1, unit)) for name in ("hidden_states", "rotary_pos_emb")}
    return given | split


def windowed(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    rotary_pos_emb: Tensor,
    window_index: Tensor,
    cu_window_seqlens: Tensor,
) -> Tensor:
    """Qwen2.5-VL's encoder: attention within windows, over whole images in some layers.

    self: LMDeploy's module. hidden_states: pixels [tokens, unit, pixels of a patch]. rotary_pos_emb: angles [tokens,
    unit, head size / 2]. window_index: [tokens], the tokens in the order of windows. cu_seqlens: [images], where each
    image's patches end. cu_window_seqlens: [windows + 1]. Returns features in the images' order, [tokens, hidden].
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
