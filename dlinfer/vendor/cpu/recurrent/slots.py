"""Read the states of sequences from their slots, and write them back.

places: [sequences], which of the states in its slot each sequence means; None if a slot holds one state.
"""

from torch import Tensor


def place(cache: Tensor, past_lengths: Tensor | None, more: Tensor | int = 0) -> Tensor | None:
    """Return which state of a slot is the one after ``more`` tokens behind ``past_lengths``."""
    return None if past_lengths is None else (past_lengths.long() + more) % cache.shape[1]


def states_of(cache: Tensor, state_ids: Tensor, fresh: Tensor, places: Tensor | None) -> Tensor:
    """Copy each sequence's state. A sequence that begins, or has no slot, gets zeros, whatever the slot holds."""
    rows = state_ids.clamp(min=0)
    states = cache.index_select(0, rows) if places is None else cache[rows.long(), places]
    empty = fresh | (state_ids < 0)
    return states.masked_fill_(empty.view(-1, *(1,) * (states.dim() - 1)), 0)


def keep(
    cache: Tensor, state_ids: Tensor, states: Tensor, places: Tensor | None, chosen: Tensor | None = None
) -> None:
    """Write states [sequences, ...] into the slots of the ``chosen`` sequences (None: all) that have a slot."""
    kept = state_ids >= 0 if chosen is None else (state_ids >= 0) & chosen
    if not bool(kept.all()):
        rows = kept.nonzero()[:, 0]
        state_ids, states = state_ids[rows], states.index_select(0, rows)
        places = None if places is None else places[rows]
    if places is None:
        cache.index_copy_(0, state_ids.long(), states.to(cache.dtype))
    else:
        cache[state_ids.long(), places] = states.to(cache.dtype)
