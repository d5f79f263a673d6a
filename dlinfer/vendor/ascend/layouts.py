"""The layout of tensors on the card, decided once for all kernels.

Every tensor has torch's layout (ND). The card's own FRACTAL_NZ, in tiles of 16 x 16, makes some products faster. But
torch shows such a tensor with the shape of an ND one, so copies, slices and checkpoint loaders that do not know the
layout read garbage. Which products gain has to be measured on a card; then change ``weight`` and ``CACHE_MODE``.
"""

from torch import Tensor

ND, FRACTAL_NZ = 2, 29
"""Numbers of formats in CANN's acl_base.h, as npu_format_cast takes them."""

CACHE_MODE = "Norm"
"""Of npu_scatter_pa_kv_cache, whose own default is PA_NZ: caches are [blocks, block_size, heads, size], ND."""

WEIGHTS = ND


def weight(tensor: Tensor) -> Tensor:
    """A matrix of weights as products take it."""
    assert WEIGHTS == ND, "a cast with npu_format_cast belongs here"
    return tensor


def rows(x: Tensor) -> Tensor:
    """x [..., size] as contiguous rows [n, size]; a view where it lies so already."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def version(tensor: Tensor) -> int:
    """A number that changes when a tensor is written; always 0 of one made in inference mode, where none is counted."""
    return 0 if tensor.is_inference() else tensor._version
