"""Split boolean attention masks into runs. A run is a range of consecutive queries that one attention call can serve.

All queries of a run see the same range of keys, or the range of each query ends one key after the range of the query
before. Almost all masks of transformers consist of few runs: causal masks, sliding windows, padding on either side, a
static cache that is not full. The runs are read from the mask's values, so it does not matter how the mask was made.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """A run: the queries ``first`` to ``last`` of one sequence, which see keys from ``begin`` to ``end``.

    ``last`` and ``end`` are exclusive.
    causal: the keys of the last query end at ``end``, and the keys of each earlier query end one key earlier.
    window: the most keys that a query sees. None means no limit.
    """

    first: int
    last: int
    begin: int
    end: int
    causal: bool
    window: int | None


def runs_of(mask: Tensor) -> list[list[Run]] | None:
    """Return the runs of each sequence. Return None if the mask does not consist of a few runs, or if heads differ.

    mask: bool [batch, 1 or heads, queries, keys], true if the query sees the key. Queries that see no key are in no
    run.
    """
    if mask.dtype != torch.bool or mask.dim() != 4 or not mask.numel():
        return None
    if mask.shape[1] != 1:
        if mask.stride(1) != 0 and not bool((mask == mask[:, :1]).all()):
            return None
        mask = mask[:, :1]
    rows = mask[:, 0]
    keys = rows.shape[-1]
    counts = rows.sum(-1)
    begins = rows.to(torch.uint8).argmax(-1)
    ends = keys - rows.flip(-1).to(torch.uint8).argmax(-1)
    seen = counts > 0
    if bool((seen & (ends - begins != counts)).any()):
        return None
    per_sequence: list[list[Run]] = []
    for begin, end, some in zip(begins.tolist(), ends.tolist(), seen.tolist(), strict=True):
        runs = _sequence(begin, end, some)
        if runs is None:
            return None
        per_sequence.append(runs)
    return per_sequence


def _sequence(begins: list[int], ends: list[int], seen: list[bool]) -> list[Run] | None:
    """Return the runs of one sequence in the order of queries. Return None for more than ``_AT_MOST`` runs.

    Each run is as long as possible. begins, ends: the range of keys that each query sees. seen: whether the query sees
    any key.
    """
    runs: list[Run] = []
    row, rows = 0, len(begins)
    while row < rows:
        if not seen[row]:
            row += 1
            continue
        if len(runs) == _AT_MOST:
            return None
        run = _run(begins, ends, seen, row)
        runs.append(run)
        row = run.last
    return runs


_AT_MOST = 4
"""The most runs of a sequence. For a mask with more runs, one attention call with the mask is faster."""


def _run(begins: list[int], ends: list[int], seen: list[bool], first: int) -> Run:
    """Return the longest run that starts at the query ``first``."""
    last, rows = first + 1, len(begins)
    begin, end = begins[first], ends[first]
    if last < rows and seen[last] and ends[last] == end + 1:
        window: int | None = None
        while last < rows and seen[last] and ends[last] == ends[last - 1] + 1:
            if window is None and begins[last] == begins[last - 1] + 1:
                window = ends[last - 1] - begins[last - 1]
            if begins[last] != (begin if window is None else max(begin, ends[last] - window)):
                break
            last += 1
        if last > first + 1:
            return Run(first, last, begin, ends[last - 1], True, window)
    while last < rows and seen[last] and begins[last] == begin and ends[last] == end:
        last += 1
    return Run(first, last, begin, end, False, None)
