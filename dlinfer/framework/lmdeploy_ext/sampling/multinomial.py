"""Multinomial sampling that draws the same tokens for the same seed.

LMDeploy's default calls ``torch.multinomial`` without a generator, and ignores ``random_seed``. LMDeploy's CUDA kernel
draws one uniform number for each row from Philox4x32-10 (Salmon et al., SC 2011, doi:10.1145/2063384.2063405). Philox's
key is the request's seed; its counter is the number of the request's tokens. The kernel returns the token where the sum
of the sorted probabilities reaches the uniform number. The code here does the same: equal probabilities and seeds give
equal tokens.
"""

from typing import Any

import numpy as np
import torch
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingImpl
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_TO_UNIT = np.float32(4.6566127342e-10)  # just below 2^-31, as in triton's uint_to_uniform_float
_FEW = 8  # rows: up to this number Python is faster than numpy, with a microsecond per call


def philox_uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """Return the number in [0, 1) that ``triton.language.rand`` returns for each pair (seed, counter): float32 [B].

    seeds: int64 [B], all 64 bits count. counters: integers [B], the lower 32 bits count.
    """
    if len(seeds) <= _FEW:
        pairs = zip(seeds.tolist(), counters.tolist(), strict=True)
        words = np.array(
            [_first_word(seed & _LOW, seed >> 32 & _LOW, counter & _LOW) for seed, counter in pairs]
        )
    else:
        seed, counter = (part.cpu().numpy().astype(np.int64).view(np.uint64) for part in (seeds, counters))
        words = _first_word(seed & _LOW, seed >> 32, counter & _LOW)
    signed = words.astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.where(signed < 0, ~signed, signed).astype(np.float32) * _TO_UNIT)


def _first_word(key0: Any, key1: Any, c0: Any) -> Any:
    """Return the first 32-bit word of Philox4x32-10 for the key (key0, key1) and the counter (c0, 0, 0, 0).

    key0, key1, c0: 32-bit words, each an int or an array of uint64.
    """
    c1 = c2 = c3 = c0 & 0
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 x 32 bits fit into 64
        c0, c2 = (product1 >> 32) ^ c1 ^ key0, (product0 >> 32) ^ c3 ^ key1
        c1, c3 = product1 & _LOW, product0 & _LOW
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return c0


class SeededMultinomialSampling(MultinomialSamplingImpl):
    """Draws one token for each row, by inverse transform sampling with a number that the row's seed determines."""

    @classmethod
    def from_spec(cls, spec: Any) -> "SeededMultinomialSampling":
        return cls()

    # The abstract method of LMDeploy lacks its self.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, scores: Tensor, seeds: Tensor, offsets: Tensor, indices: Tensor | None = None
    ) -> Tensor:
        """Return the drawn tokens, int64 [B].

        scores: [B, V], probabilities in descending order. seeds, offsets: [B], Philox's keys and counters. indices: [B,
        V], the token of each score; None if the score's index is the token. If a row's random number exceeds the sum of
        its scores, because of rounding, the row's first token is drawn.
        """
        drawn = philox_uniform(seeds, offsets).to(scores.device)
        sums = scores.float().cumsum(-1)
        place = torch.searchsorted(sums, drawn[:, None])
        place = place.masked_fill(place == scores.shape[-1], 0)
        return place[:, 0] if indices is None else indices.gather(1, place)[:, 0]
