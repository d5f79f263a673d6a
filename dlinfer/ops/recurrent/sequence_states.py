"""Sequences of the ops that have a state for each sequence: their tokens, their slots, and rules for both.

Tokens of B sequences lie one sequence behind the other; ``q_ends[b]`` is the first token behind those of sequence b.
A cache holds states in slots; ``state_ids[b]`` is the slot of sequence b. A sequence that is ``fresh`` begins here:
its state is zero, whatever the slot holds of an earlier sequence. A sequence with a negative id has no slot: its state
starts at zero and is not stored. A sequence without tokens leaves its slot as it is.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from dlinfer.ops.core.checks import Rules, ints


class Sequence(NamedTuple):
    """One sequence that has tokens: first one and the one behind its last, its slot or None, and whether it begins."""

    start: int
    end: int
    slot: int | None
    fresh: bool


def check_numbers(rules: Rules, slots: int, state_ids: Tensor, q_ends: Tensor, tokens: int) -> list[int]:
    """Ends do not fall and the last is the number of tokens; ids are below ``slots``. Raises OpArgumentError.

    It reads the numbers, so it is for kernels and not for fakes. Returns the ends, those of no sequences being none.
    """
    ends = ints(q_ends)
    rising = all(end <= next_end for end, next_end in zip([0, *ends], ends, strict=False))
    rules.require(
        rising and (ends[-1] if ends else 0) == tokens,
        "q_ends",
        lambda: f"numbers that do not fall and end with {tokens}, the tokens",
        lambda: ends,
    )
    highest = int(state_ids.max()) if ends else -1
    rules.require(highest < slots, "state_ids", lambda: f"ids below {slots}", lambda: highest)
    return ends


def sequences(
    rules: Rules, slots: int, state_ids: Tensor, q_ends: Tensor, fresh: Tensor, tokens: int
) -> Iterator[Sequence]:
    """The sequences that have tokens, in order, for references. Raises OpArgumentError as ``check_numbers`` does."""
    ends = check_numbers(rules, slots, state_ids, q_ends, tokens)
    start = 0
    for end, slot, begins in zip(ends, ints(state_ids), map(bool, ints(fresh)), strict=True):
        if end > start:
            yield Sequence(start, end, slot if slot >= 0 else None, begins)
        start = end
