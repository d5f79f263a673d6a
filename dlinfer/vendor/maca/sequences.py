"""Lengths of a step's sequences for the card's attention, and the layout of tokens' tensors."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=128)
def on_card(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as int32 on the card. Cached for every layer of a step; read only."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def ends(lengths: list[int], device: torch.device) -> Tensor:
    """Return flash_attn's cu_seqlens: each sequence's beginning, and the end."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return on_card(tuple(offsets), device)


def of_sequences(kv_seqlens: Tensor, device: torch.device) -> Tensor:
    """Return lengths for decode kernels. Lengths on the card stay there, which a graph needs."""
    if kv_seqlens.device == device:
        return kv_seqlens.to(torch.int32).contiguous()
    return on_card(tuple(kv_seqlens.tolist()), device)


def counts(ends: Tensor) -> list[int]:
    """Return the tokens of each sequence. Waits for the card if ``ends`` are there; LMDeploy's are on the host."""
    numbers = ends.tolist()
    return [end - start for start, end in zip([0, *numbers[:-1]], numbers, strict=True)]


def whole(x: Tensor) -> Tensor:
    """Make the numbers of each head dense in x; heads and tokens may lie anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()
