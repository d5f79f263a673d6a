"""A few elements of each weight, by which a write is noticed that torch does not count: one through ``.data``.

numpy reads the elements where they are, by a view of the process's own memory: one call for all weights of one element
size. That costs some nanoseconds an element where weights are in a cache, some tens where they are not.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlinfer.graph.ir.device import HOST

SAMPLES = 16
"""Elements of each weight: one of each sixteenth of it, so that a write to an eighth or more in one piece is seen."""

_ADDRESSES = 1 << 62
"""More bytes than any processor can address: for an element behind the end numpy would read the last element."""


class WeightSamples:
    """What some elements of weights were. The weights must be alive, and where they were, whenever it is asked."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        by_word: dict[int, list[tuple[int, Any]]] = {}
        for owner, weight in enumerate(weights):
            if weight.device.type == HOST and weight.layout is torch.strided and weight.numel():
                size, address = weight.element_size(), weight.data_ptr()
                word = math.gcd(
                    size, address, 8
                )  # less than an element where that has 16 bytes or is unaligned
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
        """Whether all of them still are what they were."""
        for (window, places, _), before in zip(self._groups, self._before, strict=True):
            if not np.array_equal(window.take(places, mode="clip"), before):
                return False
        return True

    def changed(self, owners: Collection[int]) -> set[int]:
        """Of some weights, by their numbers, those with an element that is not what it was."""
        different: set[int] = set()
        for (window, places, owner), before in zip(self._groups, self._before, strict=True):
            asked = np.isin(owner, list(owners))
            now = window.take(places[asked], mode="clip")
            different |= set(owner[asked][now != before[asked]].tolist())
        return different


def _offsets(weight: Tensor) -> Any:
    """Offsets of elements, in elements: one at random of each of equal parts of the weight."""
    count = min(SAMPLES, weight.numel())
    ends = np.linspace(0, weight.numel(), count + 1).astype(np.int64)
    chosen = ends[:-1] + (np.random.default_rng().random(count) * np.diff(ends)).astype(np.int64)
    indices = np.unravel_index(chosen, weight.shape) if weight.dim() else ()
    offsets = np.zeros(count, np.int64)
    for index, stride in zip(indices, weight.stride(), strict=True):
        offsets += index * stride
    return offsets


class _Memory:
    """The process's memory as an array, which numpy reads only where it is indexed. It begins behind address 0."""

    def __init__(self, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (size, True),
            "shape": (_ADDRESSES // size - 1,),
            "typestr": f"{'<' if size > 1 else '|'}u{size}",
        }


_WINDOWS = {size: np.asarray(_Memory(size)) for size in (1, 2, 4, 8)}
