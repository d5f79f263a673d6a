"""Prompts over DeepSeek's latent cache: one KV head, with 512 latent and 64 rotated elements, for all query heads.

npu_fused_infer_attention_score_v2 takes at most 16 queries in a row of its batch. So a prompt is split into rows of 16
queries and a shorter last row. A row sees the keys up to its own last token.

The op takes the rotated parts of queries and keys as separate contiguous arguments (query_rope, key_rope). So a step's
pages are gathered, and the two parts of the keys are copied apart.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import KernelDeclined
from dlinfer.vendor.ascend import chips, refusing
from dlinfer.vendor.ascend.attention import fused

SIZE, ROPE = 512, 64
"""The size of a value and of a key's latent part, and the size of a key's rotated part."""
QUERIES, PAGES, HEADS = 16, (16, 128), (1, 2, 4, 8, 16, 32, 64, 128)
"""Limits of the op: the most queries of a row, the numbers of slots in a page, and the numbers of heads."""
_PAGE = 128  # for tokens that are in no cache yet


def fits(kv_heads: int, size: int, size_v: int) -> bool:
    """Return whether the head count and the sizes of keys and values are those of a latent cache."""
    return (kv_heads, size, size_v) == (1, SIZE + ROPE, SIZE)


def refuses(call: Any, block_size: int = _PAGE) -> str | None:
    """Return a reason to refuse a call over a latent cache; None if it is served."""
    if not call.causal or call.window_left >= 0 or call.logit_softcapping > 0:
        return "a latent cache needs causal attention without window and logit_softcapping"
    if (call.alibi_slopes, call.sinks) != (None, None):
        return "a latent cache does not support alibi_slopes or sinks"
    if call.num_q_heads not in HEADS:
        return f"a latent cache needs one of {', '.join(map(str, HEADS))} query heads, not {call.num_q_heads}"
    if block_size not in PAGES:
        return f"blocks of a latent cache must have {PAGES[0]} or {PAGES[1]} slots, not {block_size}"
    return refusing.first(
        (
            refusing.lacking(chips.current().fused_attention, "npu_fused_infer_attention_score_v2"),
            refusing.floating(call.q, refusing.HALVES),
        )
    )


def attend_to_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Sequence[tuple[int, int]],
    scale: float,
    out: Tensor,
) -> None:
    """Write the attention of prompts to their own new tokens into ``out``.

    spans: for each prompt, the end of its queries in q and the number of its keys.
    """
    counts = [-(-length // _PAGE) for _, length in spans]
    pages = [x.new_zeros(sum(counts), _PAGE, x.shape[-1]) for x in (k, v)]
    table = torch.zeros(len(spans), max([*counts, 1]), dtype=torch.int32)
    page, start = 0, 0
    for row, (count, (_, length)) in enumerate(zip(counts, spans, strict=True)):
        for paged, new in zip(pages, (k, v), strict=True):
            paged[page : page + count].view(-1, paged.shape[-1])[:length] = new[start : start + length, 0]
        table[row, :count] = torch.arange(page, page + count)
        page, start = page + count, start + length
    _attend(q, pages[0], pages[1], table, spans, scale, out)


def attend_to_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_offsets: Tensor,
    spans: Sequence[tuple[int, int]],
    scale: float,
    out: Tensor,
) -> None:
    """Do the same as ``attend_to_tokens``, but read keys and values from caches [blocks, block_size, 1, size]."""
    block_size = k_cache.shape[1]
    counts = [-(-length // block_size) for _, length in spans]
    chosen = torch.cat([block_offsets[row, :count] for row, count in enumerate(counts)]).long()
    table, page = torch.zeros(len(spans), max([*counts, 1]), dtype=torch.int32), 0
    for row, count in enumerate(counts):
        table[row, :count] = torch.arange(page, page + count)
        page += count
    _attend(q, k_cache[chosen, :, 0], v_cache[chosen, :, 0], table, spans, scale, out)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    spans: Sequence[tuple[int, int]],
    scale: float,
    out: Tensor,
) -> None:
    """Call the op once for each group of rows with the same number of queries (see ``_rows``), and write into ``out``.

    keys, values: [pages, slots, size], contiguous. table: the pages of each sequence, int32 in host memory.
    """
    latent, rotated = keys[..., :SIZE].contiguous(), keys[..., SIZE:].contiguous()
    rows: dict[int, list[tuple[int, int, int]]] = {}
    for row in _rows(spans):
        rows.setdefault(row[1] - row[0], []).append((row[0], row[2], row[3]))
    results = []
    for count, same_count in rows.items():
        places = torch.tensor([start for start, _, _ in same_count]).view(-1, 1) + torch.arange(count)
        query = q[places.to(q.device)]
        seen: dict[str, Any] = {"sparse_mode": 0}
        if count > 1:
            seen = {"sparse_mode": 3, "atten_mask": fused.template(q.device)}
        result, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
            query[..., :SIZE].contiguous(),
            latent,
            values,
            query_rope=query[..., SIZE:].contiguous(),
            key_rope=rotated,
            actual_seq_kvlen=[length for _, length, _ in same_count],
            block_table=table[[sequence for _, _, sequence in same_count]].to(q.device),
            num_query_heads=q.shape[1],
            num_key_value_heads=1,
            softmax_scale=scale,
            input_layout="BSND",
            block_size=keys.shape[1],
            **seen,
        )
        results.append((places.flatten().to(q.device), result.flatten(0, 1)))
    for places, result in results:  # written when all of q has been read
        out[places] = result


def _rows(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Split the queries of each sequence into rows of at most 16. Yield four numbers for each row.

    They are the row's first query, the end of its queries, the number of keys that its last query sees, and its
    sequence. Raises KernelDeclined for a sequence with more queries than keys.
    """
    start = 0
    for sequence, (end, length) in enumerate(spans):
        if end - start > length:
            raise KernelDeclined(
                reason=f"a sequence of a latent cache has {end - start} queries but only {length} keys"
            )
        for first in range(start, end, QUERIES):
            last = min(first + QUERIES, end)
            yield first, last, length - (end - last), sequence
        start = end
