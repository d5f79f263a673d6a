"""The three attention ops on both vendors against a dense float64 oracle, over random batches and extras."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops, vendor
from tests.ops import cases, dense_oracle

MANY = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,  # the same examples in every run: a failure repeats
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Batch:
    q_lens: list[int]
    kv_lens: list[int]
    heads: int
    kv_heads: int
    size: int
    size_v: int
    block_size: int
    dtype: torch.dtype
    causal: bool
    window: int | tuple[int, int] | None
    softcap: float
    alibi: bool
    sinks: bool
    scale: float | None
    in_place: bool
    strided: bool
    index_dtype: torch.dtype
    seed: int


@st.composite
def batches(draw: st.DrawFn, op: str) -> Batch:
    sequences = draw(st.integers(1, 4))
    lengths = st.lists(st.integers(1, 24), min_size=sequences, max_size=sequences)
    q_lens = [1] * sequences if op == "paged_decode_attention" else draw(lengths)
    causal = op == "paged_decode_attention" or draw(st.booleans())
    kv_lens = q_lens
    if op != "prefill_attention":
        kv_lens = [a + b for a, b in zip(q_lens, draw(lengths), strict=True)]
    elif not causal:
        kv_lens = draw(lengths)
    kv_heads, size = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([4, 8, 12, 32]))
    size_v = draw(st.sampled_from([size, size, 4, 16]))
    bound = st.integers(-1, 12)
    return Batch(
        q_lens=q_lens,
        kv_lens=kv_lens,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        size=size,
        size_v=size_v,
        block_size=draw(st.sampled_from([1, 4, 16, 64])),
        dtype=draw(st.sampled_from(cases.DTYPES)),
        causal=causal,
        window=draw(st.one_of(st.none(), st.integers(-1, 12), st.tuples(bound, bound))),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])),
        in_place=size_v <= size and draw(st.booleans()),
        strided=draw(st.booleans()),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 2**16)),
    )


class Inputs:
    """The tensors of a batch, packed and in pages whose unwritten slots hold NaN."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        generator = torch.Generator().manual_seed(batch.seed)

        def normal(*shape: int) -> Tensor:
            if batch.strided:
                shape = (shape[0], shape[1] + 1, *shape[2:])
            values = torch.randn(shape, generator=generator).to(batch.dtype)
            return values[:, 1:] if batch.strided else values

        tokens, keys = sum(batch.q_lens), sum(batch.kv_lens)
        self.q = normal(tokens, batch.heads, batch.size)
        self.k = normal(keys, batch.kv_heads, batch.size)
        self.v = normal(keys, batch.kv_heads, batch.size_v)
        self.slopes = torch.rand(batch.heads, generator=generator) if batch.alibi else None
        self.sinks = torch.randn(batch.heads, generator=generator).to(batch.dtype) if batch.sinks else None
        self.q_ends = torch.tensor(batch.q_lens).cumsum(0).to(batch.index_dtype)
        self.kv_lens = torch.tensor(batch.kv_lens, dtype=batch.index_dtype)
        self._fill_pages(generator)

    def _fill_pages(self, generator: torch.Generator) -> None:
        batch = self.batch
        needed = [-(-length // batch.block_size) for length in batch.kv_lens]
        order = torch.randperm(sum(needed) + 1, generator=generator)
        self.table = torch.full((len(needed), max(needed) + 1), -7, dtype=batch.index_dtype)
        slots, first = [], 0
        for row, (length, count) in enumerate(zip(batch.kv_lens, needed, strict=True)):
            blocks = order[first : first + count]
            self.table[row, :count] = blocks
            places = blocks[:, None] * batch.block_size + torch.arange(batch.block_size)
            slots.append(places.flatten()[:length])
            first += count
        shape = (len(order), batch.block_size, batch.kv_heads)
        self.k_cache = torch.full((*shape, batch.size), torch.nan, dtype=batch.dtype)
        self.v_cache = torch.full((*shape, batch.size_v), torch.nan, dtype=batch.dtype)
        ops.fill_kv_cache(self.k, self.v, self.k_cache, self.v_cache, torch.cat(slots))

    def want(self) -> Tensor:
        """The oracle's answer, computed before the op may write into q."""
        batch, rows, start, kv_start = self.batch, [], 0, 0
        window = batch.window
        if not isinstance(window, tuple):  # an int: LMDeploy's (w, w); below 1 no window
            window = (window, window) if window is not None and window > 0 else (-1, -1)

        def array(x: Tensor | None) -> Any:
            return None if x is None else x.double().numpy()

        for q_len, kv_len in zip(batch.q_lens, batch.kv_lens, strict=True):
            rows.append(
                dense_oracle.attention(
                    array(self.q[start : start + q_len]),
                    array(self.k[kv_start : kv_start + kv_len]),
                    array(self.v[kv_start : kv_start + kv_len]),
                    batch.size**-0.5 if batch.scale is None else batch.scale,
                    batch.causal,
                    window,
                    batch.softcap,
                    array(self.slopes),
                    array(self.sinks),
                )
            )
            start, kv_start = start + q_len, kv_start + kv_len
        return torch.from_numpy(np.concatenate(rows))

    def got(self, op: str) -> Tensor:
        batch = self.batch
        common: dict[str, Any] = {
            "softmax_scale": batch.scale,
            "attn_output": self.q[..., : batch.size_v] if batch.in_place else None,
            "head_size_v": batch.size_v,
            "sliding_window": batch.window,
            "logit_softcapping": batch.softcap,
            "alibi_slopes": self.slopes,
            "sinks": self.sinks,
            "causal": batch.causal,
        }
        heads, pages = (
            (batch.heads, batch.kv_heads),
            (self.k_cache, self.v_cache, self.table, batch.block_size),
        )
        longest, q_lens = (
            max(batch.kv_lens),
            self.q_ends.diff(prepend=torch.zeros(1, dtype=batch.index_dtype)),
        )
        if op == "prefill_attention":
            ends = {"actual_seq_lengths_cpu": self.q_ends} if batch.seed % 2 else {}
            return ops.prefill_attention(
                self.q, self.k, self.v, None, None, q_lens, self.kv_lens, None, *heads, [], **common, **ends
            )
        if op == "paged_prefill_attention":
            new = (self.q, self.k, self.v, *pages, self.q_ends, self.kv_lens, max(batch.q_lens), longest)
            return ops.paged_prefill_attention(*new, *heads, [], **common)
        return ops.paged_decode_attention(
            self.q, *pages, self.q_ends, self.kv_lens, longest, *heads, **common
        )


@pytest.mark.parametrize("vendor_name", ["cpu", pytest.param("reference", marks=pytest.mark.full)])
@pytest.mark.parametrize("op", ["prefill_attention", "paged_prefill_attention", "paged_decode_attention"])
@MANY
@given(data=st.data())
def test_attention(op, vendor_name, data):
    vendor.use(vendor_name)
    inputs = Inputs(data.draw(batches(op)))
    want = inputs.want()
    got = inputs.got(op)
    note(f"largest difference {(got.double() - want).abs().max():.2e}")
    assert got.dtype is inputs.batch.dtype
    if inputs.batch.in_place:
        assert got.data_ptr() == inputs.q.data_ptr()
    cases.assert_close([got], [want], ops.registry()[op].tolerances[inputs.batch.dtype])
