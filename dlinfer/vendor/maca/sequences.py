"""Sequence lengths for the card's attention, and the memory layout of token tensors."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=128)
def on_card(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as an int32 tensor on the card. All layers of a step share the tensor: do not write into it."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def ends(lengths: list[int], device: torch.device) -> Tensor:
    """Return flash_attn's cu_seqlens: where each sequence begins, and where the last one ends."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return on_card(tuple(offsets), device)


def of_sequences(kv_seqlens: Tensor, device: torch.device) -> Tensor:
    """Return lengths for decode kernels. Lengths that are on the card stay there, as a captured graph needs."""
    if kv_seqlens.device == device:
        return kv_seqlens.to(torch.int32).contiguous()
    return on_card(tuple(kv_seqlens.tolist()), device)


def counts(ends: Tensor) -> list[int]:
    """Return how many tokens each sequence has. ends: [sequences], where each sequence's tokens end.

    LMDeploy passes ``ends`` in host memory. If it is on the card, this waits for the card.
    """
    numbers = ends.tolist()
    return [end - start for start, end in zip([0, *numbers[:-1]], numbers, strict=True)]


def whole(x: Tensor) -> Tensor:
    """Return x with dense elements in each head. There may be gaps between heads and between tokens."""
    return x if x.stride(-1) == 1 else x.contiguous()
