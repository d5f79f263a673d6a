"""Weights, activations, keys and values with the statistics of trained models, as papers report them.

Random weights of a normal distribution have none of these, and are easy to quantise.

- Heavy tails: weights and activations of most of 30 networks follow a Student's t-distribution, with about 5 degrees
  of freedom (Dotzel et al., "Learning from Students", 2024, arXiv:2405.03103).
- Outlier features: some 0.1 % of the hidden features are up to 20 times as large as the others, in all tokens
  (Dettmers et al., "LLM.int8()", 2022, arXiv:2208.07339).
- Massive activations: a few activations are more than 1000 times the median, at the first token and in fixed features.
  In Llama-2-7B they are near 2600, and the median is near 0.2 (Sun et al., "Massive Activations in Large Language
  Models", 2024, arXiv:2402.17762).
- Attention sinks: the first token takes most of the attention (Xiao et al., "Efficient Streaming Language Models with
  Attention Sinks", 2023, arXiv:2309.17453).
- Outlier channels of keys: a few channels of the keys are large in all tokens; values have none (Liu et al., "KIVI",
  2024, arXiv:2402.02750).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

OUTLIER = 20.0
"""How many times as large outliers are (LLM.int8())."""

MASSIVE = 10_000.0
"""How many times the median massive activations are (Llama-2-7B)."""


def heavy_tailed(seed: int, *shape: int) -> Tensor:
    """Return numbers of Student's t-distribution with 5 degrees of freedom, float32, scaled to a variance of 1."""
    generator = torch.Generator().manual_seed(seed)
    freedom = 5
    normal, *others = torch.randn(freedom + 1, *shape, generator=generator).unbind()
    chi_squared = torch.stack(others).square().sum(0)
    return normal / (chi_squared / freedom).sqrt() * math.sqrt((freedom - 2) / freedom)


def weight(seed: int, out_features: int, in_features: int) -> Tensor:
    """Return a weight [out_features, in_features], float32, that keeps the size of its inputs."""
    return heavy_tailed(seed, out_features, in_features) * in_features**-0.5


def features(hidden: int, share: float = 0.001) -> Tensor:
    """Return the indices of a share of the hidden features, at least two, spread evenly."""
    count = max(round(hidden * share), 2)
    return (torch.arange(count) * 2 + 1) * hidden // (2 * count)


def with_outliers(x: Tensor, times: float = OUTLIER) -> Tensor:
    """Return x [..., hidden] with ``features(hidden)`` ``times`` as large."""
    x = x.clone()
    x[..., features(x.shape[-1])] *= times
    return x


def with_massive(x: Tensor, times: float = MASSIVE) -> Tensor:
    """Return x [tokens, hidden] with two massive activations at the first token."""
    x = x.clone()
    x[0, features(x.shape[-1])] = torch.tensor([1.0, -1.0]) * times * x.abs().median()
    return x


class Attended(NamedTuple):
    """Queries, keys and values [tokens, heads, size], float32."""

    q: Tensor
    k: Tensor
    v: Tensor


def attended(seed: int, tokens: int, heads: int, size: int, times: float = 1.0) -> Attended:
    """Return queries, keys and values in which the first token takes most of the attention.

    times: the factor of two channels of the keys; ``OUTLIER`` for those of KIVI.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, tokens, heads, size, generator=generator).unbind()
    sink, *large = features(size, 3 / size).tolist()
    q[..., sink] = size**0.5 / 2
    k[0, :, sink] = 2 * (math.log(tokens) + 2)
    k[..., large] = times * (1 + 0.1 * k[..., large])
    v[0] /= 10
    return Attended(q, k, v)
