"""More samples for ops: sizes that overflow float32 counters or short buffers, and the vendor's KV-cache block size.

These samples are large, so only the check ``values`` uses them. Sizes over 2**24 run only in thorough runs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.attention.samples import DECODE, PAGED_PREFILL, decode_arguments, paged_prefill_arguments
from dlinfer.ops.attention.samples import Case as Batch
from dlinfer.ops.core.samples import SampleMaker

LONG = 1 << 17
"""The number of tokens of a long context."""

COUNT = 1 << 24
"""Above this number, float32 represents no odd numbers."""

LARGE = "over 2**24"
"""The prefix of the names of samples that a quick run omits."""

_BLOCK = 16

USUAL_BLOCK = 64
"""LMDeploy's block size. It is used for vendors that declare no block size."""


def names(op: str) -> list[str]:
    """Return the names of an op's border samples; most ops have none."""
    return list(_MAKERS.get(op, {}))


def arguments(op: str, name: str, make: SampleMaker) -> tuple[Any, ...]:
    return _MAKERS[op][name](make)


def _long_pages(make: SampleMaker) -> tuple[Tensor, Tensor, Tensor]:
    """Return (k_cache, v_cache, block_offsets) of one sequence of ``LONG`` tokens, whose blocks lie in random order."""
    blocks = LONG // _BLOCK
    caches = (make.cache(blocks, _BLOCK, 1, 16), make.cache(blocks, _BLOCK, 1, 16))
    return *caches, make.permutation(blocks)[None]


def _zeros(make: SampleMaker, blocks: int, size: int) -> Tensor:
    return torch.zeros(make.layout.shape(blocks, _BLOCK, 1, size), dtype=make.dtype, device=make.device)


def _long_decode(make: SampleMaker) -> tuple[Any, ...]:
    lengths, out = torch.tensor([LONG - 1]), make.tensor(1, 2, 16)
    rest = (_BLOCK, lengths, LONG - 1, 2, 1, out, 0.25, -1, 0.0, None, None)
    return make.tensor(1, 2, 16), *_long_pages(make), *rest


def _far_decode(make: SampleMaker) -> tuple[Any, ...]:
    """Return decoding arguments for a sequence whose two blocks lie behind more than 2**24 other slots of the cache."""
    blocks, size = COUNT // _BLOCK + 3, 2
    caches = [_zeros(make, blocks, size) for _ in range(2)]
    for cache in caches:
        make.layout.canonical(cache)[-2:] = make.tensor(2, _BLOCK, 1, size)
    table = torch.tensor([[blocks - 1, blocks - 2]], device=make.device)
    rest = (_BLOCK, torch.tensor([29]), 29, 2, 1, make.tensor(1, 2, size), 0.7, -1, 0.0, None, None)
    return make.tensor(1, 2, size), *caches, table, *rest


def _long_prefill(make: SampleMaker) -> tuple[Any, ...]:
    ends, lengths, out = torch.tensor([2]), torch.tensor([LONG]), make.tensor(2, 2, 16)
    rest = (_BLOCK, ends, lengths, 2, LONG, 2, 1, out, 0.25, True, -1, -1, 0.0, None, None)
    return make.tensor(2, 2, 16), *_long_pages(make), *rest


def _long_fill(make: SampleMaker) -> tuple[Any, ...]:
    blocks = LONG // _BLOCK
    slots = torch.tensor([LONG - 1, 0, LONG - 17], device=make.device)
    return make.tensor(3, 1, 8), make.tensor(3, 1, 8), _zeros(make, blocks, 8), _zeros(make, blocks, 8), slots


def _far_fill(make: SampleMaker) -> tuple[Any, ...]:
    caches = [_zeros(make, COUNT // _BLOCK + 2, 1) for _ in range(2)]
    slots = torch.tensor([COUNT + 1, COUNT + 3, 7, COUNT - 1], device=make.device)
    return make.tensor(4, 1, 1), make.tensor(4, 1, 1), *caches, slots


def _rows(make: SampleMaker, size: int, count: int = 1) -> list[Tensor]:
    """Return ``count`` tensors [rows, size] with more than 2**24 elements.

    Rows repeat, because only addressing is tested.
    """
    rows = COUNT // size + 3
    pattern = make.tensor(count, 1021, size)
    return [rows_of.repeat(-(-rows // 1021), 1)[:rows] for rows_of in pattern]


def _in_blocks(batch: Batch, size: int) -> Batch:
    """Return ``batch`` with blocks of ``size`` slots.

    Change each length, but keep its distance to the nearest block border.
    """

    def moved(keys: int) -> int:
        whole, rest = divmod(keys, batch.block_size)
        near_end = rest >= batch.block_size // 2
        return whole * size + (size - batch.block_size + rest if near_end else rest)

    return replace(batch, block_size=size, kv_lens=tuple(map(moved, batch.keys)))


def _served(
    table: tuple[Batch, ...], arguments_of: Callable[[SampleMaker, Batch], tuple[Any, ...]]
) -> dict[str, Callable[[SampleMaker], tuple[Any, ...]]]:
    """Return sample name -> function that makes the arguments, in the vendor's block size.

    table: the batches. Each gives one sample, except batches with aliased tensors. arguments_of: makes an op's
    arguments for a batch.
    """

    def made(make: SampleMaker, batch: Batch) -> tuple[Any, ...]:
        return arguments_of(make, _in_blocks(batch, make.layout.block_size or USUAL_BLOCK))

    return {
        f"in the vendor's blocks: {batch.name}": partial(made, batch=batch)
        for batch in table
        if not batch.aliased
    }


_MAKERS: dict[str, dict[str, Callable[[SampleMaker], tuple[Any, ...]]]] = {
    "paged_decode_attention": {
        "128k positions": _long_decode,
        f"{LARGE} slots in the cache": _far_decode,
        **_served(DECODE, decode_arguments),
    },
    "paged_prefill_attention": {
        "128k positions": _long_prefill,
        **_served(PAGED_PREFILL, paged_prefill_arguments),
    },
    "fill_kv_cache": {"128k positions": _long_fill, f"{LARGE} slots in the cache": _far_fill},
    "rms_norm": {
        "128k tokens": lambda make: (make.tensor(LONG, 8), make.tensor(8), 1e-6),
        f"{LARGE} elements": lambda make: (*_rows(make, 8), make.tensor(8), 1e-6),
    },
    "silu_and_mul": {
        "128k tokens": lambda make: (make.tensor(LONG, 16),),
        f"{LARGE} elements": lambda make: tuple(_rows(make, 8)),
    },
    "silu_mul": {f"{LARGE} elements": lambda make: tuple(_rows(make, 8, 2))},
    "add_rms_norm": {f"{LARGE} elements": lambda make: (*_rows(make, 8, 2), make.tensor(8), 1e-6)},
}
