"""Check that a cache write's slots are the places that paged attention computes itself."""

import torch
from torch import Tensor

from dlinfer.graph.ir.own_ops import own_op
from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.core.checks import Rules

_FILL, _ATTENTION = Rules("fill_kv_cache"), Rules("paged_prefill_attention")


def check_slots(
    kv_start_indices: Tensor,
    block_offsets: Tensor,
    block_size: int,
    q_ends: Tensor | None,
    kv_seqlens: Tensor,
    caches: list[Tensor],
) -> None:
    """Check that a cache write's slots are the last positions of each sequence in the sequence's own blocks.

    Attention assumes these slots.

    The arguments are those of ``cached_attention``.
    caches: the layers' caches, one for each distinct number of blocks.

    Raises OpArgumentError, also for a block outside the caches, or a length outside the table."""
    # On the host, which needs the answer. Slots and blocks are on the device, lengths often on the host.
    slots, table, lengths = (tensor.long().cpu() for tensor in (kv_start_indices, block_offsets, kv_seqlens))
    sequences, width = table.shape
    ends = torch.arange(1, sequences + 1) if q_ends is None else q_ends.long().cpu()
    tokens = slots.shape[0]
    written = int(ends[-1]) if sequences else 0
    _FILL.require(
        tokens == written, "kv_start_indices", f"{written} slots, one for each query", lambda: tokens
    )
    new = ends.diff(prepend=ends.new_zeros(1))
    _check_range(lengths, new, width * block_size)
    column = torch.arange(width)
    blocks = min(canonical(cache).shape[0] for cache in caches)
    lost = ((table < 0) | (table >= blocks)) & (column * block_size < lengths[:, None])
    if bool(lost.any()):
        raise _ATTENTION.error("block_offsets", f"blocks below {blocks}", table[lost][0].item())
    sequence = torch.repeat_interleave(new, output_size=tokens)
    position = torch.arange(tokens) + (lengths - ends)[sequence]
    expected = table[sequence, position // block_size] * block_size + position % block_size
    if torch.equal(expected, slots):
        return
    token = int((expected != slots).nonzero()[0])
    raise _FILL.error(
        "kv_start_indices",
        f"slot {int(expected[token])} for token {token}, the slot after its sequence's cached tokens (the graph "
        "writes the cache and attends to it in one step)",
        int(slots[token]),
    )


def _check_range(lengths: Tensor, new: Tensor, longest: int) -> None:
    bad = (lengths < new) | (lengths > longest) | (new < 0)
    if bool(bad.any()):
        sequence = int(bad.nonzero()[0])
        expected = f"{int(new[sequence])} to {longest} keys for sequence {sequence}"
        raise _ATTENTION.error("kv_seqlens", expected, int(lengths[sequence]))


# On fakes it checks nothing: the merged ops have already checked everything but values.
CHECK_SLOTS = own_op(check_slots, lambda *_: None, only_raises=True)
