"""Find the text that followed the last tokens of a sequence when they occurred before.

The last tokens of a sequence are an n-gram. If the same n-gram occurs earlier, the tokens behind that occurrence are a
draft of the next tokens. Such a draft is often right where an answer quotes its prompt or repeats itself.
"""

from typing import NamedTuple

import numpy as np

_RECENT = 512
"""Number of last tokens that are searched first. A text that loops has its match there."""


class Match(NamedTuple):
    """An earlier occurrence of the last ``size`` tokens. distance: how many tokens earlier it occurs, 1 or more."""

    size: int
    distance: int


def find(tokens: np.ndarray, smallest: int, largest: int) -> Match | None:
    """Return the latest of the longest matches of ``smallest`` to ``largest`` tokens; None if there is no match.

    tokens: int [N]. smallest: 1 or more.
    """
    if len(tokens) > _RECENT:
        match = _find(tokens[-_RECENT:], smallest, largest)
        if match is not None and match.size == largest:
            return match
    return _find(tokens, smallest, largest)


def _find(tokens: np.ndarray, smallest: int, largest: int) -> Match | None:
    best = None
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the matches of this size end, in order
    for size in range(1, largest + 1):
        if size > 1:
            if len(ends) and ends[0] < size - 1:  # this match begins at the first token
                ends = ends[1:]
            ends = ends[tokens[ends - (size - 1)] == tokens[-size]] if len(ends) else ends
        if not len(ends):
            break
        if size >= smallest:
            best = Match(size, len(tokens) - 1 - int(ends[-1]))
    return best


def continuation(tokens: np.ndarray, distance: int, count: int) -> np.ndarray:
    """Return ``count`` tokens that would follow if the text repeated what it has ``distance`` tokens earlier.

    tokens: int [N]. If fewer tokens follow the earlier occurrence, they repeat.
    """
    return np.resize(tokens[-distance:], count)
