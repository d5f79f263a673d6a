"""Read the states of sequences from their slots, and write them back."""

from torch import Tensor


def states_of(cache: Tensor, state_ids: Tensor, fresh: Tensor) -> Tensor:
    """Copy each sequence's state. A sequence that begins, or has no slot, gets zeros, whatever the slot holds."""
    states = cache.index_select(0, state_ids.clamp(min=0))
    empty = fresh | (state_ids < 0)
    return states.masked_fill_(empty.view(-1, *(1,) * (cache.dim() - 1)), 0)


def keep(cache: Tensor, state_ids: Tensor, states: Tensor, chosen: Tensor | None = None) -> None:
    """Write states [sequences, ...] into the slots of the ``chosen`` sequences (None: all) that have a slot."""
    kept = state_ids >= 0 if chosen is None else (state_ids >= 0) & chosen
    if bool(kept.all()):
        cache.index_copy_(0, state_ids.long(), states.to(cache.dtype))
    else:
        rows = kept.nonzero()[:, 0]
        cache.index_copy_(0, state_ids.long()[rows], states.index_select(0, rows).to(cache.dtype))
