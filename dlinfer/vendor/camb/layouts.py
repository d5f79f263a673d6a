"""How tensors lie when the vendor's ops get them: decided here for all kernels.

The documents say of few ops which strides they take. Rows and weights are given without gaps. Heads ``[tokens, heads,
size]`` may be a part of a packed projection, as the vendor's own vLLM gives them: only the rows are apart then.
"""

from functools import cache

import torch
from torch import Tensor

BLOCK_SIZE = 16
"""Slots in a block of the KV cache: the one size that flash_attention reads pages of."""


def rows(x: Tensor) -> Tensor:
    """x [..., size] as contiguous rows [n, size]; a view where it lies so already."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def heads(x: Tensor) -> Tensor:
    """x [tokens, heads, size] whose heads follow each other within a token; a copy where they do not."""
    return x if has_dense_heads(x) else x.contiguous()


def has_dense_heads(x: Tensor) -> bool:
    """Whether a token's heads lie in one piece, and tokens do not lie over each other."""
    tokens, count, size = x.shape
    dense = (x.stride(2) == 1 or size == 1) and (x.stride(1) == size or count == 1)
    return dense and (x.stride(0) >= count * size or tokens == 1)


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether values are the first numbers of each key, in its memory, as DeepSeek's are; keys have no gaps."""
    same = k_cache.untyped_storage()._cdata == v_cache.untyped_storage()._cdata
    return (
        same
        and k_cache.is_contiguous()
        and k_cache.storage_offset() == v_cache.storage_offset()
        and k_cache.stride() == v_cache.stride()
        and k_cache.shape[:-1] == v_cache.shape[:-1]
    )


def index(x: Tensor, device: torch.device) -> Tensor:
    """Lengths, blocks and slots: int32, without gaps, on the card."""
    return x.to(device, torch.int32).contiguous()


@cache
def ones(size: int, device: torch.device) -> Tensor:
    """float32 [size], for quantisers that want a smoothing factor for each channel. Never written."""
    return torch.ones(size, dtype=torch.float32, device=device)


def version(tensor: Tensor) -> int:
    """A number that changes when a tensor is written; always 0 of one made in inference mode, where none is counted."""
    return 0 if tensor.is_inference() else tensor._version
