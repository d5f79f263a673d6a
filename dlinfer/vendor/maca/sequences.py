"""Lengths of a step's sequences as the card's attention reads them, and how tensors of tokens lie for it."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=128)
def on_card(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 on the card, which every layer of a step asks for; it is read only."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def ends(lengths: list[int], device: torch.device) -> Tensor:
    """flash_attn's cu_seqlens of so many sequences: where each begins, and the end."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return on_card(tuple(offsets), device)


def of_sequences(kv_seqlens: Tensor, device: torch.device) -> Tensor:
    """Lengths as kernels of decoding read them; those on the card stay there, which a graph needs."""
    if kv_seqlens.device == device:
        return kv_seqlens.to(torch.int32).contiguous()
    return on_card(tuple(kv_seqlens.tolist()), device)


def counts(ends: Tensor) -> list[int]:
    """Tokens of each sequence; waits for the card where the numbers lie there, and LMDeploy's lie on the host."""
    numbers = ends.tolist()
    return [end - start for start, end in zip([0, *numbers[:-1]], numbers, strict=True)]


def whole(x: Tensor) -> Tensor:
    """x with the numbers of a head side by side; heads and tokens may lie anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()
