"""A decode step of transformers' attention: one query in each sequence, over the keys in transformers' cache.

``paged_decode_attention`` reads transformers' cache as a paged KV cache. Each sequence then has one block, as long as
the cache.
"""

import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.transformers_ext.mask_runs import Run
from dlinfer.ops.attention.kv_cache import kv_order


def serves(query: Tensor, runs: list[list[Run]]) -> bool:
    """Return whether ``attend`` can compute the attention.

    It can if each sequence has one query, each query sees one range of keys or none, and the vendor's KV cache layout
    is BSHD.
    """
    return (
        query.shape[2] == 1
        and all(len(sequence) <= 1 for sequence in runs)
        and kv_order(query.device.type) == "BSHD"
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: list[list[Run]],
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention as a new tensor [batch, 1, heads, value_size].

    runs: from ``runs_of``. sinks: the attention sinks, [heads]. ``attention_forward`` describes the other arguments.
    """
    batch, heads, _, _ = query.shape
    out = query.new_empty(batch, heads, value.shape[-1])
    ends = [sequence[0].end if sequence else 0 for sequence in runs]
    seen = [sequence[0].end - sequence[0].begin if sequence else 0 for sequence in runs]

    def some(rows: slice, window: int | None) -> None:
        lengths = torch.tensor(ends[rows])
        count = len(lengths)
        ops.paged_decode_attention(
            query[rows, :, 0],
            key[rows].transpose(1, 2),
            value[rows].transpose(1, 2),
            torch.arange(count, device=query.device)[:, None],
            key.shape[2],
            lengths,
            lengths,
            key.shape[2],
            heads,
            key.shape[1],
            softmax_scale=scaling,
            attn_output=out[rows],
            sliding_window=None if window is None else (window, -1),
            logit_softcapping=softcap,
            sinks=sinks,
        )

    if seen == ends:  # all sequences see keys from the first on
        some(slice(None), None)
    elif len(set(seen)) == 1:
        some(slice(None), seen[0] - 1)
    else:  # one call for each sequence, for example with padding on the left
        for row, count in enumerate(seen):
            some(slice(row, row + 1), count - 1 if count else None)
    return out[:, None]
