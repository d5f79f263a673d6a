"""The sequences of ops that keep a state for each sequence: their tokens, their slots, and checks of both.

The tokens of B sequences are packed one sequence after another. ``q_ends[b]`` is the index after the last token of
sequence b. A cache holds states in slots; ``state_ids[b]`` is the slot of sequence b. A sequence that is ``fresh``
begins here: its state starts at zero, whatever an earlier sequence left in the slot. A sequence with a negative id has
no slot: its state starts at zero, and is not stored. A sequence without tokens leaves its slot as it is.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from dlinfer.ops.core.checks import Rules, ints


class Sequence(NamedTuple):
    """One sequence with tokens.

    end: the index after its last token. slot: None for no slot. fresh: whether the sequence begins here.
    """

    start: int
    end: int
    slot: int | None
    fresh: bool


def check_numbers(rules: Rules, slots: int, state_ids: Tensor, q_ends: Tensor, tokens: int) -> list[int]:
    """Return ``q_ends`` as a list. Raise OpArgumentError if an end is wrong, or an id is not below ``slots``.

    Ends must not decrease, and the last must be the number of tokens. The check reads the values, so only kernels call
    it; fake tensors have no values.
    """
    ends = ints(q_ends)
    rising = all(end <= next_end for end, next_end in zip([0, *ends], ends, strict=False))
    rules.require(
        rising and (ends[-1] if ends else 0) == tokens,
        "q_ends",
        lambda: f"ends that never decrease and whose last one is {tokens}, the number of tokens",
        lambda: ends,
    )
    highest = int(state_ids.max()) if ends else -1
    rules.require(highest < slots, "state_ids", lambda: f"ids below {slots}", lambda: highest)
    return ends


def sequences(
    rules: Rules, slots: int, state_ids: Tensor, q_ends: Tensor, fresh: Tensor, tokens: int
) -> Iterator[Sequence]:
    """Yield the sequences that have tokens, in order. Raise OpArgumentError as ``check_numbers`` does."""
    ends = check_numbers(rules, slots, state_ids, q_ends, tokens)
    start = 0
    for end, slot, begins in zip(ends, ints(state_ids), map(bool, ints(fresh)), strict=True):
        if end > start:
            yield Sequence(start, end, slot if slot >= 0 else None, begins)
        start = end
