"""The memory layout of tensors on the card, for all kernels.

Every tensor has torch's layout (ND). The card's own layout FRACTAL_NZ, in tiles of 16 x 16, makes some matrix products
faster. But torch shows a tensor in FRACTAL_NZ with the shape of an ND one, so copies, slices and checkpoint loaders
that do not know the layout read garbage. To use FRACTAL_NZ, measure on a card which matrix products become faster, and
change ``weight`` and ``CACHE_MODE``.
"""

from torch import Tensor

ND, FRACTAL_NZ = 2, 29
"""Formats of tensors for npu_format_cast, as numbered in CANN's acl_base.h."""

CACHE_MODE = "Norm"
"""npu_scatter_pa_kv_cache's mode for caches [blocks, block_size, heads, size] in ND. The op's default is PA_NZ."""

WEIGHTS = ND


def weight(tensor: Tensor) -> Tensor:
    """Return a weight matrix in the layout that matrix products read. As ``WEIGHTS`` is ND, this is ``tensor``."""
    assert WEIGHTS == ND, "a cast with npu_format_cast belongs here"
    return tensor


def rows(x: Tensor) -> Tensor:
    """Reshape x [..., size] to contiguous rows [n, size]: a view if possible."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def version(tensor: Tensor) -> int:
    """Return a number that changes with each write to a tensor; always 0 for a tensor made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
