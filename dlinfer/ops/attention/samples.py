"""The attention ops' samples: one table of cases, laid out packed or in pages."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.core.samples import SampleMaker


@dataclass(frozen=True)
class Case:
    """One batch, for the attention ops' samples.

    q_lens, kv_lens: queries and keys of each sequence; kv_lens=None means as many keys as queries.
    strided: q, k and v are views of one packed tensor.
    aliased: attn_output is q's memory.
    unused_rows: rows of q after the last sequence.
    The other fields are arguments of the ops.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    block_size: int = 8
    scale: float | None = None
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    strided: bool = False
    aliased: bool = False
    unused_rows: int = 0
    index_dtype: torch.dtype = torch.int64

    @property
    def keys(self) -> tuple[int, ...]:
        """The number of keys of each sequence."""
        return self.q_lens if self.kv_lens is None else self.kv_lens

    @property
    def softmax_scale(self) -> float:
        """The softmax scale that the ops get."""
        return self.sizes[0] ** -0.5 if self.scale is None else self.scale


EXTRAS: dict[str, dict[str, Any]] = {
    "window": {"window": (5, 5)},
    "window of one token": {"window": (0, 0)},
    "soft-cap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "all extras": {"window": (6, -1), "softcap": 3.0, "alibi": True, "sinks": True},
}

PREFILL = (
    Case("grouped heads, mixed lengths", (1, 9, 2, 17)),
    Case("one token", (1,), heads=(4, 4), index_dtype=torch.int32),
    Case("one KV head", (7, 7), heads=(6, 1), sizes=(32, 32)),
    Case("values smaller than keys", (5, 12), heads=(2, 2), sizes=(24, 16)),
    Case("values larger than keys", (5, 12), heads=(4, 1), sizes=(8, 16)),
    Case("softmax scale", (6,), scale=0.5),
    Case("an empty sequence", (3, 0, 4)),
    Case("rows behind the last sequence", (3, 4), unused_rows=2),
    Case("not causal", (9, 4), causal=False),
    Case("cross attention", (3, 8), (11, 5), causal=False),
    Case("not causal, window", (12,), causal=False, window=(2, 3)),
    Case("more queries than keys", (9,), (4,)),
    *(Case(name, (13, 3), **extra) for name, extra in EXTRAS.items()),
    Case("views of a packed qkv", (9, 4), strided=True),
    Case("output in q", (9, 4), aliased=True),
    Case("smaller output in q", (9, 4), heads=(2, 2), sizes=(24, 16), aliased=True),
)

PAGED_PREFILL = (
    Case("grouped heads, mixed lengths and histories", (1, 9, 2, 5), (1, 20, 33, 5)),
    Case("block boundaries", (2, 2, 2, 8), (7, 8, 9, 16)),
    Case("no history", (5, 8), heads=(4, 4), index_dtype=torch.int32),
    Case("one KV head, other block size", (3, 4), (40, 4), heads=(6, 1), sizes=(32, 32), block_size=16),
    Case("values smaller than keys", (5, 2), (12, 30), heads=(2, 2), sizes=(24, 16)),
    Case("softmax scale", (3,), (20,), scale=0.5),
    Case("not causal", (3, 4), (20, 4), causal=False),
    *(Case(name, (5, 3), (29, 3), **extra) for name, extra in EXTRAS.items()),
    Case("views of a packed qkv", (5, 2), (12, 2), strided=True),
    Case("rows behind the last sequence", (3, 4), (9, 4), unused_rows=2),
    Case("output in q", (5, 2), (12, 30), aliased=True),
    Case("smaller output in q", (5, 2), (12, 30), heads=(2, 2), sizes=(24, 16), aliased=True),
)

DECODE = (
    Case("grouped heads, mixed lengths", (1,) * 4, (1, 20, 33, 5)),
    Case("block boundaries", (1,) * 4, (7, 8, 9, 16)),
    Case("one sequence", (1,), (13,), heads=(4, 4), index_dtype=torch.int32),
    Case("full blocks", (1, 1), (16, 16)),
    Case("one KV head, other block size", (1, 1), (40, 4), heads=(6, 1), sizes=(32, 32), block_size=16),
    Case("values smaller than keys", (1, 1), (12, 30), heads=(2, 2), sizes=(24, 16)),
    Case("softmax scale", (1,), (20,), scale=0.5),
    Case("a padding row", (1,) * 3, (9, 0, 4)),
    *(Case(name, (1, 1), (29, 3), **extra) for name, extra in EXTRAS.items()),
    Case("views of a packed qkv", (1, 1), (12, 2), strided=True),
    Case("output in q", (1, 1), (12, 30), aliased=True),
    Case("smaller output in q", (1, 1), (12, 30), heads=(2, 2), sizes=(24, 16), aliased=True),
)


def queries(make: SampleMaker, case: Case) -> tuple[Tensor, Tensor]:
    """Return (q, attn_output) of a case."""
    rows, heads = sum(case.q_lens) + case.unused_rows, case.heads[0]
    if case.strided:
        q = make.tensor(rows, heads + 2 * case.heads[1], case.sizes[0])[:, :heads]
    else:
        q = make.tensor(rows, heads, case.sizes[0])
    return q, q[..., : case.sizes[1]] if case.aliased else make.tensor(rows, heads, case.sizes[1])


def new_tokens(make: SampleMaker, case: Case) -> tuple[Tensor, Tensor]:
    """Return the packed (k, v) of a case."""
    tokens, heads = sum(case.keys), case.heads[1]
    if case.strided:
        both = make.tensor(tokens, 2 * heads, case.sizes[0])
        return both[:, :heads], both[:, heads:]
    return make.tensor(tokens, heads, case.sizes[0]), make.tensor(tokens, heads, case.sizes[1])


def pages(make: SampleMaker, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return (k_cache, v_cache, block_offsets) of a case.

    Blocks are in random order, unwritten slots hold NaN, and the block table has one column too many.
    """
    needed = [-(-length // case.block_size) for length in case.keys]
    order = make.permutation(sum(needed) + 2)
    table = order[-1:].repeat(len(needed), max(needed) + 1)
    written = torch.zeros(len(order), case.block_size, dtype=torch.bool, device=make.device)
    first = 0
    for row, (length, count) in enumerate(zip(case.keys, needed, strict=True)):
        table[row, :count] = order[first : first + count]
        written.view(-1)[_slots(table[row, :count], case.block_size)[:length]] = True
        first += count
    caches: list[Tensor] = []
    for size in case.sizes:
        cache = make.cache(len(order), case.block_size, case.heads[1], size)
        make.layout.canonical(cache)[~written] = torch.nan
        caches.append(cache)
    return caches[0], caches[1], table.to(case.index_dtype)


def _slots(blocks: Tensor, block_size: int) -> Tensor:
    return (blocks[:, None] * block_size + torch.arange(block_size, device=blocks.device)).flatten()


def lengths(case: Case) -> tuple[Tensor, Tensor]:
    """Return (q_ends, kv_seqlens) of a case, on the host, as LMDeploy passes them."""
    ends = torch.tensor(case.q_lens).cumsum(0).to(case.index_dtype)
    return ends, torch.tensor(case.keys, dtype=case.index_dtype)


def per_head(make: SampleMaker, case: Case) -> tuple[Tensor | None, Tensor | None]:
    """Return (alibi_slopes, sinks) of a case."""
    slopes = 2.0 ** -torch.arange(1, case.heads[0] + 1, device=make.device)
    return slopes if case.alibi else None, make.tensor(case.heads[0]) if case.sinks else None


def scoring(make: SampleMaker, case: Case) -> tuple[Any, ...]:
    """Return a case's arguments of the prefill ops from ``softmax_scale`` to the last one."""
    return case.softmax_scale, case.causal, *case.window, case.softcap, *per_head(make, case)


def paged_prefill_arguments(make: SampleMaker, case: Case) -> tuple[Any, ...]:
    """Return a case's arguments of the torch op ``paged_prefill_attention``."""
    q, out = queries(make, case)
    longest = max(case.q_lens), max(case.keys)
    tables = *pages(make, case), case.block_size, *lengths(case), *longest
    return q, *tables, *case.heads, out, *scoring(make, case)


def decode_arguments(make: SampleMaker, case: Case) -> tuple[Any, ...]:
    """Return a case's arguments of the torch op ``paged_decode_attention``."""
    q, out = queries(make, case)
    tables = *pages(make, case), case.block_size, lengths(case)[1], max(case.keys)
    extras = case.softmax_scale, case.window[0], case.softcap, *per_head(make, case)
    return q, *tables, *case.heads, out, *extras
