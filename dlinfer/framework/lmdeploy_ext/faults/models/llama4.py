"""Correct Llama 4: attention in chunks, norms of q and k, scaled queries, and prompts with images."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.models import image_prompts
from dlinfer.framework.lmdeploy_ext.faults.models.one_position import of_images
from dlinfer.framework.patching import Original

_MODELS = "lmdeploy.pytorch.models.llama4"
_MODEL = f"{_MODELS}:Llama4ForConditionalGeneration"
_VISION = "lmdeploy.vl.model.llama4:LLama4VisionModel"


# --- the language model


@corrects(
    f"{_MODELS}:Llama4TextAttention.__init__",
    why="gives q and k a norm with weights, which no checkpoint has, and chooses layers by number, not by their fields",
)
def _attention(
    original: Original, self: Any, config: Any, layer_idx: int, dtype: Any = None, device: Any = None
) -> None:
    original(self, config, layer_idx, dtype, device)
    if hasattr(self, "qk_norm"):
        del self.qk_norm
    self.use_rope = bool(config.no_rope_layers[layer_idx])


@corrects(
    f"{_MODELS}:Llama4TextModel.forward",
    why="does not tell layers without rotary positions where a token is",
)
def _forward(
    original: Original,
    self: Any,
    inputs_embeds: Tensor,
    position_ids: Tensor,
    past_key_values: Any,
    attn_metadata: Any = None,
    **kwargs: Any,
) -> Tensor:
    cos, sin = self.rotary_emb(inputs_embeds, position_ids)
    tables = (cos[0], sin[0], position_ids[0])
    x, residual = inputs_embeds, None
    for layer, past in zip(self.layers, past_key_values, strict=False):
        x, residual = layer(
            x, rotary_pos_emb=tables, past_key_value=past, residual=residual, attn_metadata=attn_metadata
        )
    return self.norm(x, residual)[0]


@corrects(
    f"{_MODELS}:Llama4TextAttention.forward",
    why="does not scale the queries of layers without rotary positions by their position",
)
def _attend(
    original: Original,
    self: Any,
    hidden_states: Tensor,
    rotary_pos_emb: tuple[Tensor, Tensor, Tensor],
    past_key_value: Any = None,
    attn_metadata: Any = None,
) -> Tensor:
    """Compute attention. rotary_pos_emb: cos, sin, and the tokens' positions, int64 [tokens]."""
    q, k, v = self.qkv_proj.split_qkv(self.qkv_proj(hidden_states).flatten(0, -2))
    cos, sin, positions = rotary_pos_emb
    config = self.config
    if self.use_rope:
        # Neighbours turn together. Scores do not depend on the order of numbers in q and k, so it stays changed.
        q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        q, k = self.apply_rotary_pos_emb(q, k, cos, sin)
        if config.use_qk_norm:
            q, k = (_unit(x, config.rms_norm_eps) for x in (q, k))
    elif config.attn_temperature_tuning:
        scales = ((positions + 1.0) / config.floor_scale).floor().log1p() * config.attn_scale + 1.0
        q = (q * scales[:, None, None]).to(q.dtype)
    out = self.attn_fwd(q, k, v, *past_key_value[:2], attn_metadata, *past_key_value[2:], inplace=True)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1))


def _unit(x: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], eps=eps).type_as(x)


@corrects(
    f"{_MODEL}.prepare_inputs_for_generation",
    why="computes attention over the whole text where it ends with a chunk, and takes an image token in a text for a "
    "part of an image",
)
def _prepare(
    original: Original, self: Any, past_key_values: Any, inputs_embeds: Any = None, context: Any = None
) -> dict[str, Any]:
    inputs = original(self, past_key_values, inputs_embeds, context)
    text = self.config.text_config
    if "chunked_attention" in text.layer_types:
        note_chunks(context.attn_metadata, text.attention_chunk_size)
    if inputs["image_mask"] is not None:
        inputs["image_mask"] &= of_images(context, closing=True)
    return inputs


def note_chunks(meta: Any, size: int) -> None:
    """Set the fields ``chunk_...`` of a step's metadata. size: the number of tokens of a chunk, whole blocks."""
    ends, lengths = meta.cu_seqlens_q_cpu.tolist(), meta.kv_seqlens_cpu.tolist()
    parts: list[tuple[int, int, int, int]] = []  # sequence, first token of the chunk, new tokens, tokens
    for sequence, length in enumerate(lengths):
        begin = max(length - (ends[sequence + 1] - ends[sequence]), 0)
        for first in range(begin // size * size, max(length, 1), size):
            end = min(first + size, length)
            parts.append((sequence, first, end - max(begin, first), end - first))
    sequences, firsts, new, tokens = torch.tensor(parts).unbind(1)
    meta.chunk_ends, meta.chunk_lengths = new.cumsum(0), tokens.contiguous()
    table = meta.block_offsets
    count = min(size // meta.block_size, table.shape[1])
    columns = firsts[:, None] // meta.block_size + torch.arange(count)
    columns = columns.clamp_max_(table.shape[1] - 1).to(table.device)
    meta.chunk_blocks = table[sequences.to(table.device)].gather(1, columns)


# --- images


@corrects(
    f"{_MODELS}:Llama4VisionRotaryEmbedding.__init__",
    why="keeps a table of complex numbers, which a graph cannot hold",
)
def _rotary_table(original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
    original(self, config, dtype, device)
    cos, sin = torch.view_as_real(self.freqs_ci).unbind(-1)
    del self.freqs_ci
    self.register_buffer("freqs_ci", torch.stack([cos, sin]), persistent=False)


@corrects(
    f"{_MODELS}:Llama4VisionAttention.forward",
    why="multiplies complex numbers, and infers a size beside the number of images, which a graph cannot know",
)
def _attend_to_patches(original: Original, self: Any, hidden_states: Tensor, freqs_ci: Tensor) -> Tensor:
    """Compute attention among the patches of each tile, [tiles, patches, width].

    freqs_ci: the table above, [2, patches, 1, size / 2] with cos and sin.
    """
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv_proj(hidden_states).chunk(3, -1))
    q, k = (ops.apply_rotary_pos_emb_interleaved(x.float(), *freqs_ci, False).to(x.dtype) for x in (q, k))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v)
    return self.o_proj(out.transpose(1, 2).flatten(2))


@corrects(f"{_VISION}.build_preprocessor", why="cannot start without torchvision, even for texts alone")
def _preprocessor(original: Original, self: Any, trust_remote_code: bool = False) -> None:
    if image_prompts.has_torchvision():
        original(self, trust_remote_code)


def _marks(model: Any, tokenizer: Any) -> dict[str, Any]:
    tokens = {"place": model.processor.image_token, "token": model.processor.img_patch_token}
    return tokens | {"written": lambda image: image.pop("image_prompts")}


PATCHES = (image_prompts.corrected(f"{_VISION}.to_pytorch", _marks),)
