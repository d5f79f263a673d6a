"""The sizes of a model that a KV pool needs."""

from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.errors import UnsupportedFeatureError


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a model's keys and values on one rank.

    head_size: the size of a head, if keys and values have the same size.
    k_head_size, v_head_size: the sizes of a head of keys and of values, if they differ; else 0.
    data_byte_size: the size in bytes of one element.
    """

    device: torch.device
    dtype: torch.dtype
    data_byte_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    k_head_size: int = 0
    v_head_size: int = 0


def model_info(config: Any, device: torch.device, dtype: torch.dtype, world_size: int) -> ModelInfo:
    """Return the sizes of the keys and values on one of world_size ranks. config: the Hugging Face config of the model.

    Raises UnsupportedFeatureError unless every layer has attention, with heads of the same size.
    """
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if others or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedFeatureError(
            feature=f"{text.model_type} ({', '.join(others) or 'an encoder and a decoder'})",
            where="dlinfer's GeneratorTorch",
            advice="use a decoder with attention in every layer",
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    k_size, v_size = 0, 0
    if getattr(
        text, "kv_lora_rank", None
    ):  # multi-head latent attention: transformers expands keys and values to all heads
        kv_heads = heads
        k_size, v_size = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    return ModelInfo(
        device=device,
        dtype=dtype,
        data_byte_size=dtype.itemsize,
        num_layers=text.num_hidden_layers,
        num_kv_heads=kv_heads // world_size,
        head_size=size,
        k_head_size=k_size,
        v_head_size=v_size,
    )
