"""Sampled elements of each weight, to notice writes through ``.data``, which torch does not count.

numpy reads the elements through a view of the process's memory, in one call for all weights of one element size.
Reading an element takes a few nanoseconds if it is in a CPU cache, and some tens of nanoseconds if not.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlinfer.graph.ir.device import HOST

SAMPLES = 16
"""The number of sampled elements per weight: one from each sixteenth of the weight.

A contiguous write to an eighth of the weight or more reaches a sampled element."""

_ADDRESSES = 1 << 62
"""The number of bytes in ``_Memory``: more than a processor can address, because numpy clips larger indices."""


_Places = npt.NDArray[np.int64]


class WeightSamples:
    """Values of sampled elements. The weights must stay alive and keep their memory while the object is used."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        by_word: dict[int, list[tuple[int, _Places]]] = {}
        for owner, weight in enumerate(weights):
            if weight.device.type == HOST and weight.layout is torch.strided and weight.numel():
                size, address = weight.element_size(), weight.data_ptr()
                # Less than an element if the element has 16 bytes or is unaligned.
                word = math.gcd(size, address, 8)
                elements = address + size * _offsets(weight)
                words = elements[:, None] + np.arange(0, size, word)
                by_word.setdefault(word, []).append((owner, words.reshape(-1) // word))
        self._groups = [
            (
                _WINDOWS[word],
                np.concatenate([places for _, places in owned]) - 1,
                np.concatenate([np.full(len(places), owner) for owner, places in owned]),
            )
            for word, owned in by_word.items()
        ]
        self._before = [window.take(places, mode="clip") for window, places, _ in self._groups]

    def same(self) -> bool:
        for (window, places, _), before in zip(self._groups, self._before, strict=True):
            if not np.array_equal(window.take(places, mode="clip"), before):
                return False
        return True

    def changed(self, owners: Collection[int]) -> set[int]:
        """Return the numbers of the weights whose sampled elements changed.

        owners: the numbers of the weights to check.
        """
        different: set[int] = set()
        for (window, places, owner), before in zip(self._groups, self._before, strict=True):
            chosen = np.isin(owner, list(owners))
            now = window.take(places[chosen], mode="clip")
            different |= set(owner[chosen][now != before[chosen]].tolist())
        return different


def _offsets(weight: Tensor) -> _Places:
    """Return the offsets, in elements, of random elements: one from each of up to 16 equal parts of the weight."""
    count = min(SAMPLES, weight.numel())
    ends = np.linspace(0, weight.numel(), count + 1).astype(np.int64)
    chosen = ends[:-1] + (np.random.default_rng().random(count) * np.diff(ends)).astype(np.int64)
    indices = np.unravel_index(chosen, weight.shape) if weight.dim() else ()
    offsets = np.zeros(count, np.int64)
    for index, stride in zip(indices, weight.stride(), strict=True):
        offsets += index * stride
    return offsets


class _Memory:
    """The process's memory as an array of ``size``-byte words; numpy reads only the words that are indexed.

    Word 0 lies at address ``size``, because address 0 is null.
    """

    def __init__(self, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (size, True),
            "shape": (_ADDRESSES // size - 1,),
            "typestr": f"{'<' if size > 1 else '|'}u{size}",
        }


_WINDOWS = {size: np.asarray(_Memory(size)) for size in (1, 2, 4, 8)}
