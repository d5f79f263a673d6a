"""Boolean attention masks as runs of queries: each run sees one range of keys, fixed or growing by one key a query.

Almost all masks of transformers are such runs: causal, with a sliding window, with padding on either side, over a
static cache that is not full. The runs are read from the mask itself, so the rule that made it does not matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Queries ``first`` to ``last`` of one sequence, and the keys ``begin`` to ``end`` that the last of them sees.

    causal: each query sees one key fewer than the one behind it. window: how many keys a query sees at most; None is
    no bound. Ends are exclusive.
    """

    first: int
    last: int
    begin: int
    end: int
    causal: bool
    window: int | None


def runs_of(mask: Tensor) -> list[list[Run]] | None:
    """The runs of each sequence, or None where some query sees something else.

    mask: bool [batch, 1 or heads, queries, keys], true where a query sees a key. Queries that see nothing are in no
    run. Masks of several heads that differ have no runs.
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
    """The runs of one sequence, longest first come; None where more than a few would be needed."""
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
"""Runs of a sequence: more of them are another kind of mask, which one call with the mask serves better."""


def _run(begins: list[int], ends: list[int], seen: list[bool], first: int) -> Run:
    """The longest run that starts at a query."""
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
