"""Caches of results that kernels computed from tensors: the answer of a check, or weights in another layout.

An entry is valid while its tensors exist and their version counters stay the same. Tensors made in inference mode have
no version counter, so a write to them is not noticed. They must not be written after the entry was made.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

Made = tuple[list["weakref.ref[Tensor]"], list[int], Any]


def version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor; always 0 for a tensor made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _is_of(entry: Made, tensors: list[Tensor]) -> bool:
    kept, versions, _ = entry
    return (
        len(kept) == len(tensors)
        and all(reference() is tensor for reference, tensor in zip(kept, tensors, strict=True))
        and versions == [version(tensor) for tensor in tensors]
    )


class LastAnswer:
    """Remembers the last result of ``look``, a function of tensors that makes the host wait for the card.

    ``of`` calls ``look(*tensors)`` again only for other tensors, or after a write to one of them. So the host waits
    once for each step, not once for each layer.
    """

    def __init__(self, look: Callable[..., Any]) -> None:
        self._look = look
        self._made: Made | None = None

    def of(self, *tensors: Tensor) -> Any:
        entry = self._made  # another thread may replace it meanwhile
        if entry is None or not _is_of(entry, list(tensors)):
            entry = (
                [weakref.ref(tensor) for tensor in tensors],
                [version(tensor) for tensor in tensors],
                self._look(*tensors),
            )
            self._made = entry
        return entry[2]


class Kept:
    """Remembers the results of ``make`` for a checkpoint's tensors, as long as the first of the tensors exists."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._kept: dict[tuple[int, Any], Made] = {}

    def of(self, key: Any, *parts: Tensor | None) -> Any:
        """Return ``make(key, *parts)``, cached."""
        tensors = [tensor for tensor in parts if tensor is not None]
        place = id(tensors[0]), key
        entry = self._kept.get(place)
        if entry is None or not _is_of(entry, tensors):
            drop = weakref.ref(tensors[0], lambda _: self._kept.pop(place, None))
            others = [weakref.ref(tensor) for tensor in tensors[1:]]
            entry = [drop, *others], [version(tensor) for tensor in tensors], self._make(key, *parts)
            self._kept[place] = entry
        return entry[2]
