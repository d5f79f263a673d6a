"""The memory layout of tensors for the vendor's ops, for all kernels.

The documents rarely say which strides an op takes, so rows and weights are passed contiguous. Heads ``[tokens, heads,
size]`` may be a slice of a packed projection, because the vendor's own vLLM passes such slices: a token's heads are
dense, and there are gaps between tokens.
"""

from functools import cache

import torch
from torch import Tensor

BLOCK_SIZE = 16
"""Slots in a block of the KV cache. flash_attention reads no other size."""


def rows(x: Tensor) -> Tensor:
    """Reshape x [..., size] to contiguous rows [n, size]: a view if possible."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def heads(x: Tensor) -> Tensor:
    """Return x [tokens, heads, size] with dense heads in each token, copied only if they are not dense."""
    return x if has_dense_heads(x) else x.contiguous()


def has_dense_heads(x: Tensor) -> bool:
    """Return whether the heads of each token are dense, and tokens do not overlap."""
    tokens, count, size = x.shape
    dense = (x.stride(2) == 1 or size == 1) and (x.stride(1) == size or count == 1)
    return dense and (x.stride(0) >= count * size or tokens == 1)


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether values are the first elements of the keys, in the same memory, and the keys have no gaps."""
    same = k_cache.untyped_storage()._cdata == v_cache.untyped_storage()._cdata
    return (
        same
        and k_cache.is_contiguous()
        and k_cache.storage_offset() == v_cache.storage_offset()
        and k_cache.stride() == v_cache.stride()
        and k_cache.shape[:-1] == v_cache.shape[:-1]
    )


def index(x: Tensor, device: torch.device) -> Tensor:
    """Return lengths, blocks or slots as contiguous int32 on the card."""
    return x.to(device, torch.int32).contiguous()


@cache
def ones(size: int, device: torch.device) -> Tensor:
    """Return a float32 tensor of ones [size], cached and read-only, for quantisers that need smoothing factors."""
    return torch.ones(size, dtype=torch.float32, device=device)


def version(tensor: Tensor) -> int:
    """Return a number that changes with each write to a tensor; always 0 for a tensor made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
