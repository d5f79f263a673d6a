"""A cache of transformers that keeps keys and values rounded as a quantised KV cache rounds them, in plain torch.

It shares no code with dlinfer. Every token's vector of a head is rounded once, when it comes; attention sees rounded
keys and values only, those of the tokens that come with it too, as in LMDeploy's CUDA layers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def rounded(x: Tensor, policy: int) -> Tensor:
    """x [..., head size] as LMDeploy's ``quant_policy`` would read it again."""
    if policy == 0:
        return x
    if policy in (16, 17):
        dtype = {16: torch.float8_e4m3fn, 17: torch.float8_e5m2}[policy]
        largest = torch.finfo(dtype).max
        return x.float().clamp(-largest, largest).to(dtype).to(x.dtype)
    steps = 2**policy - 1
    lowest, highest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (highest - lowest) / steps
    zero = -lowest / step
    code = torch.floor(x / step + zero + 0.5).clamp(0, steps)
    return (code - zero) * step


class RoundingLayer(DynamicLayer):
    """One layer's keys and values."""

    def __init__(self, policy: int) -> None:
        super().__init__()
        self.policy = policy

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = (rounded(states, self.policy) for states in (key_states, value_states))
        return super().update(keys, values, *args, **kwargs)


def rounding_cache(layers: int, policy: int) -> DynamicCache:
    """An empty cache of a model with so many layers."""
    cache: Any = DynamicCache()
    cache.layers = [RoundingLayer(policy) for _ in range(layers)]
    return cache
