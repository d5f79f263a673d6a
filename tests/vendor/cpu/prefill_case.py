"""Batches for prefill attention in C++: packed and in pages, by the kernel and by the op's reference in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlinfer import ops


class Rules(NamedTuple):
    """The last arguments of the ops."""

    scale: float = 0.2
    causal: bool = True
    left: int = -1
    right: int = -1
    cap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None


class Case:
    """Sequences of (queries, keys), packed and over pages in random order; slots that hold no key are NaN."""

    def __init__(
        self,
        seed: int,
        lengths: list[tuple[int, int]],
        kv_heads: int,
        group: int,
        sizes: tuple[int, int],
        block: int = 16,
        dtype: torch.dtype = torch.float32,
    ):
        draw = torch.Generator().manual_seed(seed)
        tokens, keys = (sum(one[i] for one in lengths) for i in (0, 1))
        self.lengths, self.block, self.dtype = lengths, block, dtype
        self.q = torch.randn(tokens + 3, kv_heads * group, sizes[0], generator=draw).to(dtype)  # 3 of padding
        self.k = torch.randn(keys + 2, kv_heads, sizes[0], generator=draw).to(dtype)
        self.v = torch.randn(keys + 2, kv_heads, sizes[1], generator=draw).to(dtype)
        for padded, used in ((self.q, tokens), (self.k, keys), (self.v, keys)):
            padded[used:] = torch.nan
        self.slopes = torch.rand(kv_heads * group, generator=draw)
        self.sinks = torch.randn(kv_heads * group, generator=draw)
        self.ends = torch.tensor([one[0] for one in lengths], dtype=torch.int64).cumsum(0)
        self.kv_lens = torch.tensor([one[1] for one in lengths], dtype=torch.int64)
        self._fill_pages(draw)

    def _fill_pages(self, draw: torch.Generator) -> None:
        needed = [-(-keys // self.block) for _, keys in self.lengths]
        order = torch.randperm(sum(needed) + 1, generator=draw)
        self.pages = torch.full((len(needed), max(needed, default=0) + 1), -7)
        shape = (len(order) * self.block, self.k.shape[1])
        k_cache = torch.full((*shape, self.k.shape[2]), torch.nan, dtype=self.dtype)
        v_cache = torch.full((*shape, self.v.shape[2]), torch.nan, dtype=self.dtype)
        first = start = 0
        for row, (count, (_, keys)) in enumerate(zip(needed, self.lengths, strict=True)):
            own = order[first : first + count]
            self.pages[row, :count] = own
            slots = (own[:, None] * self.block + torch.arange(self.block)).flatten()[:keys]
            k_cache[slots], v_cache[slots] = self.k[start : start + keys], self.v[start : start + keys]
            first, start = first + count, start + keys
        self.k_cache, self.v_cache = (one.unflatten(0, (-1, self.block)) for one in (k_cache, v_cache))

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """Where a result goes; rows of padding stay 7."""
        return torch.full((*self.q.shape[:2], self.v.shape[2]), 7.0, dtype=dtype or self.dtype)

    def packed(self, rules: Rules, out: Tensor | None = None) -> Tensor:
        """The C++ kernel's answer for keys and values side by side."""
        out = self.empty() if out is None else out
        given = (self.q, self.k, self.v, self.ends, self.kv_lens, out, *rules)
        torch.ops.dlinfer_cpu.prefill_attention(*given)
        return out

    def paged(self, rules: Rules, out: Tensor | None = None) -> Tensor:
        """The C++ kernel's answer for keys and values in pages."""
        out = self.empty() if out is None else out
        given = (self.q, self.k_cache, self.v_cache, self.pages, self.ends, self.kv_lens, out, *rules)
        torch.ops.dlinfer_cpu.paged_prefill_attention(*given)
        return out

    def reference(self, rules: Rules) -> Tensor:
        """The reference's answer in float64."""
        out = self.empty(torch.float64)
        q, k, v = (one.double() for one in (self.q, self.k, self.v))
        sizes = (1 << 20, q.shape[1], k.shape[1])
        ops.prefill_attention.reference(q, k, v, self.ends, self.kv_lens, *sizes, out, *rules)
        return out

    def alone(self, row: int) -> "Case":
        """One of the sequences as a batch of its own."""
        one = object.__new__(Case)
        one.__dict__.update(self.__dict__)
        keys = int(self.kv_lens[:row].sum())
        start, end = int(self.ends[row - 1]) if row else 0, int(self.ends[row])
        one.q, one.ends, one.kv_lens = (
            self.q[start:end],
            self.ends[row : row + 1] - start,
            self.kv_lens[row : row + 1],
        )
        one.k, one.v = (x[keys : keys + int(one.kv_lens)] for x in (self.k, self.v))
        one.pages = self.pages[row : row + 1]
        return one


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within the op's tolerance."""
    tolerance = ops.prefill_attention.tolerances[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance.rtol, atol=tolerance.atol)
