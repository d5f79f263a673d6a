"""What is made of tensors once and kept while they are the same: answers of a look at values, weights laid out anew.

A tensor is the same while it lives and nobody has written it. Tensors that are made in inference mode count no writes:
they are known by the object alone, and may not be written anew between two steps.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

Made = tuple[list["weakref.ref[Tensor]"], list[int], Any]


def version(tensor: Tensor) -> int:
    """How often a tensor was written; always 0 of one made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _is_of(made: Made, tensors: list[Tensor]) -> bool:
    kept, versions, _ = made
    return (
        len(kept) == len(tensors)
        and all(one() is tensor for one, tensor in zip(kept, tensors, strict=True))
        and versions == [version(tensor) for tensor in tensors]
    )


class LastAnswer:
    """What ``look`` says of tensors, kept for their next askers: one wait for the card a step, not a layer."""

    def __init__(self, look: Callable[..., Any]) -> None:
        self._look = look
        self._made: Made | None = None

    def of(self, *tensors: Tensor) -> Any:
        """The answer."""
        made = self._made  # another thread may replace it meanwhile
        if made is None or not _is_of(made, list(tensors)):
            made = (
                [weakref.ref(one) for one in tensors],
                [version(one) for one in tensors],
                self._look(*tensors),
            )
            self._made = made
        return made[2]


class Kept:
    """What ``make`` gives of a checkpoint's tensors, kept while the first of them lives."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._kept: dict[tuple[int, Any], Made] = {}

    def of(self, key: Any, *given: Tensor | None) -> Any:
        """``make(key, *given)``, or what it gave before."""
        tensors = [one for one in given if one is not None]
        place = id(tensors[0]), key
        made = self._kept.get(place)
        if made is None or not _is_of(made, tensors):
            drop = weakref.ref(tensors[0], lambda _: self._kept.pop(place, None))
            others = [weakref.ref(one) for one in tensors[1:]]
            made = [drop, *others], [version(one) for one in tensors], self._make(key, *given)
            self._kept[place] = made
        return made[2]
