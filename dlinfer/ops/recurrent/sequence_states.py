"""The sequences of ops that keep a state for each sequence: their tokens, their slots, and checks of both.

The tokens of B sequences are packed one sequence after another. ``q_ends[b]`` is the index after the last token of
sequence b. A cache holds states in slots; ``state_ids[b]`` is the slot of sequence b. A sequence that is ``fresh``
begins here: its state starts at zero, whatever an earlier sequence left in the slot. A sequence with a negative id has
no slot: its state starts at zero, and is not stored. A sequence without tokens leaves its slot as it is.

A slot may hold several states, so that a sequence can take tokens back. Then ``past_lengths[b]`` is how many tokens
sequence b has before these, and of K states in a slot, state n % K is the one after n tokens of the sequence. A call
reads the state after ``past_lengths[b]`` tokens, and stores the states after each of the last K tokens. So the next
call may begin after any of these.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from dlinfer.ops.core.checks import Rules, ints


class Sequence(NamedTuple):
    """One sequence with tokens.

    end: the index after its last token. slot: None for no slot. fresh: whether the sequence begins here. past: how many
    tokens it has before these; 0 if each slot holds one state.
    """

    start: int
    end: int
    slot: int | None
    fresh: bool
    past: int


def check_states(rules: Rules, name: str, cache: Tensor, rank: int, past_lengths: Tensor | None) -> None:
    """Raise OpArgumentError unless ``cache`` has the right rank.

    name: the cache's name in the op. rank: its rank with one state in each slot. With ``past_lengths`` it has one more
    dimension, for the states in a slot. Its size must be at least 1.
    """
    rules.rank(name, cache, rank + (past_lengths is not None))
    if past_lengths is not None:
        kept = cache.shape[1]
        rules.require(kept > 0, name, "a state or more in each slot", lambda: tuple(cache.shape))


def ring(cache: Tensor, past_lengths: Tensor | None) -> Tensor:
    """Return a view [slots, K, ...] of ``cache``, where K is the number of states in a slot: 1 without past_lengths."""
    return cache.unsqueeze(1) if past_lengths is None else cache


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
    rules: Rules,
    slots: int,
    state_ids: Tensor,
    q_ends: Tensor,
    fresh: Tensor,
    past_lengths: Tensor | None,
    tokens: int,
) -> Iterator[Sequence]:
    """Yield the sequences that have tokens, in order. Raise OpArgumentError as ``check_numbers`` does."""
    ends = check_numbers(rules, slots, state_ids, q_ends, tokens)
    past = [0] * len(ends) if past_lengths is None else ints(past_lengths)
    start = 0
    for end, slot, begins, before in zip(ends, ints(state_ids), map(bool, ints(fresh)), past, strict=True):
        if end > start:
            yield Sequence(start, end, slot if slot >= 0 else None, begins, before)
        start = end
