"""LMDeploy's attention layers on our ops: every option that a layer is built with has its effect."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdeploy.messages import QuantPolicy
from lmdeploy.pytorch.backends.flash_attention import FlashAttentionBuildSpec

from dlinfer.framework.lmdeploy_ext.faults.models import gemma3_vl, llama4
from dlinfer.framework.lmdeploy_ext.layers import block_diffusion
from dlinfer.framework.lmdeploy_ext.layers.attention import (
    PagedAttention,
    VarlenAttention,
    cache_slots,
    last_slots,
    step_metadata,
)
from tests.framework.lmdeploy_ext.layers.attention_specs import HEADS, KV_HEADS, SIZE, paged_spec

BLOCK = 16


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), min_size=1, max_size=5),
    st.sampled_from([16, 32, 64]),
)
def test_cache_slots_are_those_of_each_new_token(lengths, block_size):
    q = torch.tensor([new for new, _ in lengths])
    kv = torch.tensor([new + old for new, old in lengths])
    blocks = -(-int(kv.max()) // block_size)
    table = torch.randperm(len(lengths) * blocks).view(len(lengths), blocks).int()
    cu = torch.nn.functional.pad(q.cumsum(0), (1, 0)).int()
    slots = cache_slots(q, kv, cu, table, block_size, int(q.sum()))
    expected = [
        int(table[b, position // block_size]) * block_size + position % block_size
        for b, (new, old) in enumerate(lengths)
        for position in range(old, old + new)
    ]
    assert slots.tolist() == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=7), st.sampled_from([16, 32, 64]))
def test_last_slots_are_the_cache_slots_of_decoding(lengths, block_size):
    kv, q = torch.tensor(lengths), torch.ones(len(lengths), dtype=torch.int64)
    blocks = -(-int(kv.max()) // block_size)
    table = torch.randperm(len(lengths) * blocks).view(len(lengths), blocks).int()
    ends = torch.arange(len(lengths) + 1)
    expected = cache_slots(q, kv, ends, table, block_size, len(lengths))
    got = last_slots(kv, table, block_size)
    assert got.dtype is expected.dtype and torch.equal(got, expected)


def dense(
    q, k, v, *, window=None, cap=0.0, slopes=None, sinks=None, causal=True, images=(), chunk=0, block=0
):
    """One sequence in float64: q [T, H, D] are the last positions of k, v [S, Hkv, D].

    images: (begin, end) of each, in positions; its queries see all of it. chunk: tokens of a chunk; a query sees only
        its own chunk. block: tokens of a block; a query sees all of its own block. 0 means that there are none.
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(k.shape[0])[None] - (torch.arange(q.shape[0]) + k.shape[0] - q.shape[0])[:, None]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    if block:
        places = torch.arange(k.shape[0]) // block
        scores = scores.masked_fill(places[None] > places[-q.shape[0] :, None], -torch.inf)
    elif causal:
        later = distance > 0
        first = k.shape[0] - q.shape[0]
        for begin, end in images:
            later[begin - first : end - first, begin:end] = False
        scores = scores.masked_fill(later, -torch.inf)
    if window is not None and images:
        scores = scores.masked_fill(distance < -window, -torch.inf)
    elif window is not None:
        scores = scores.masked_fill((distance < -window) | (distance > window), -torch.inf)
    if chunk:
        places = torch.arange(k.shape[0]) // chunk
        scores = scores.masked_fill(places[None] != places[-q.shape[0] :, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hts,shd->thd", weights, v)


class Step:
    """A step of two sequences over one paged cache, as LMDeploy's engine hands it to the layers."""

    def __init__(self, new: list[int], old: list[int], decoding: bool) -> None:
        torch.manual_seed(0)
        self.new, self.old = new, old
        self.total = [a + b for a, b in zip(new, old, strict=True)]
        blocks = -(-max(self.total) // BLOCK)
        self.table = torch.randperm(len(new) * blocks).view(len(new), blocks).int()
        self.k_cache = torch.zeros(len(new) * blocks, BLOCK, KV_HEADS, SIZE)
        self.v_cache = torch.zeros_like(self.k_cache)
        self.keys = [torch.randn(n, KV_HEADS, SIZE) for n in self.total]
        self.values = [torch.randn(n, KV_HEADS, SIZE) for n in self.total]
        self.query = torch.randn(sum(new), HEADS, SIZE)
        for b, length in enumerate(old):
            for position in range(length):
                block = int(self.table[b, position // BLOCK])
                self.k_cache[block, position % BLOCK] = self.keys[b][position]
                self.v_cache[block, position % BLOCK] = self.values[b][position]
        self.metadata = step_metadata(
            SimpleNamespace(
                is_decoding=decoding,
                q_seqlens=torch.tensor(new),
                kv_seqlens=torch.tensor(self.total),
                block_offsets=self.table,
                cache_config=SimpleNamespace(kernel_block_size=BLOCK),
                input_ids=torch.zeros(1, sum(new), dtype=torch.int64),
                max_q_seqlen=max(new),
                max_kv_seqlen=max(self.total),
                sum_kv_seqlen=sum(self.total),
                kv_quant_policy=0,
                local_adapter_ids=None,
            )
        )

    def run(self, layer, **options):
        fresh = [
            torch.cat([t[-n:] for t, n in zip(ts, self.new, strict=True)]) for ts in (self.keys, self.values)
        ]
        query = self.query.clone()
        out = layer.forward(query, *fresh, self.k_cache, self.v_cache, self.metadata, **options)
        assert out.data_ptr() == query.data_ptr(), "in place by default"
        return out

    def expected(self, **options):
        queries = self.query.split(self.new)
        return torch.cat(
            [dense(*step, **options) for step in zip(queries, self.keys, self.values, strict=True)]
        )


def test_the_policy_of_a_step_is_an_enum() -> None:
    """Graphs take a plain int, which ``lmdeploy chat`` sets, for an input that may change."""
    assert type(Step([1], [0], decoding=False).metadata.quant_policy) is QuantPolicy


STEPS = {
    "prefill": Step([1, 33], [0, 0], decoding=False),
    "chunked prefill": Step([5, 17], [20, 16], decoding=False),
    "decode": Step([1, 1], [31, 4], decoding=True),
    "verification of drafts": Step([3, 3], [30, 4], decoding=True),
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.3, -0.2, 1.0, 0.0])
OPTIONS = {
    "plain": ({}, {}, {}),
    "window": ({"sliding_window": (6, 6)}, {}, {"window": 6}),
    "window of transformers": ({"sliding_window": 6}, {}, {"window": 5}),
    "window of one key": ({"sliding_window": 1}, {}, {"window": 0}),
    "no window": ({"sliding_window": -1}, {}, {}),
    "soft-cap": ({"logit_softcapping": 2.0}, {}, {"cap": 2.0}),
    "alibi": ({"alibi": True}, {}, {"slopes": SLOPES}),
    "sinks": ({"learnable_sink": True}, {"learnable_sink": SINKS}, {"sinks": SINKS}),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("step", STEPS)
def test_paged_attention_passes_its_options_on(step, option):
    built, given_at_run, oracle = OPTIONS[option]
    layer = PagedAttention.from_spec(paged_spec(**built))
    if "alibi" in built:
        layer.set_alibi_slopes(SLOPES)
    out = STEPS[step].run(layer, **given_at_run)
    # float32 against float64 over at most 37 keys
    torch.testing.assert_close(out.double(), STEPS[step].expected(**oracle), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("option", ["plain", "soft-cap", "sinks"])
@pytest.mark.parametrize("length", [2, 4, 8])
@pytest.mark.parametrize(
    ("new", "old"),
    [([8, 40], [0, 0]), ([24, 16], [16, 8]), ([8, 8, 8], [24, 0, 8])],
    ids=["prefill", "chunked prefill", "decode"],
)
def test_a_token_sees_all_of_its_diffusion_block(new, old, length, option):
    built, given_at_run, oracle = OPTIONS[option]
    step = Step(new, old, decoding=False)
    block_diffusion.note_blocks(step.metadata, length)
    out = step.run(PagedAttention.from_spec(paged_spec(block_sparse_size=length, **built)), **given_at_run)
    torch.testing.assert_close(out.double(), step.expected(block=length, **oracle), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("option", ["plain", "window of transformers", "soft-cap"])
@pytest.mark.parametrize("old", [[0, 0, 0], [20, 0, 5]], ids=["prefill", "chunked prefill"])
def test_tokens_of_an_image_see_all_of_it(option, old):
    """Images at a step's begin and end, side by side, and longer than the window; a sequence without; and one token."""
    new = [30, 3, 12]
    images = [[(0, 12), (12, 17), (29, 30)], [], [(2, 12)]]
    built, _, oracle = OPTIONS[option]
    step = Step(new, old, decoding=False)
    starts = [sum(new[:b]) for b in range(len(new))]
    context = SimpleNamespace(
        attn_metadata=step.metadata,
        q_start_loc=torch.tensor(starts),
        q_seqlens=torch.tensor(new),
        kv_seqlens=torch.tensor(step.total),
        input_multimodals=[
            {"image": [SimpleNamespace(start=begin + first, end=end + first) for begin, end in own]}
            for own, first in zip(images, old, strict=True)
        ],
    )
    gemma3_vl.note_images(context)
    out = step.run(PagedAttention.from_spec(paged_spec(**built)))
    sequences = zip(step.query.split(new), step.keys, step.values, images, old, strict=True)
    expected = torch.cat(
        [
            dense(q, k, v, **oracle, images=[(begin + first, end + first) for begin, end in own])
            for q, k, v, own, first in sequences
        ]
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("new", "old"),
    [([70, 32, 1, 33], [0] * 4), ([5, 64, 33, 1], [30, 16, 31, 32]), ([1] * 5, [0, 31, 32, 63, 40])],
    ids=["prefill", "chunked prefill", "decode"],
)
def test_attention_in_chunks_sees_no_other_chunk(new, old):
    step = Step(new, old, decoding=new[0] == 1)
    llama4.note_chunks(step.metadata, 2 * BLOCK)
    layer: Any = PagedAttention.from_spec(paged_spec())
    layer.is_chunked = True
    expected = step.expected(chunk=2 * BLOCK)
    torch.testing.assert_close(step.run(layer).double(), expected, atol=2e-5, rtol=2e-5)


def test_the_cache_holds_the_new_tokens_afterwards():
    step = Step([5, 17], [20, 16], decoding=False)
    step.run(PagedAttention.from_spec(paged_spec()))
    for b, length in enumerate(step.total):
        cached = step.k_cache[step.table[b].long()].flatten(0, 1)[:length]
        assert torch.equal(cached, step.keys[b])


def test_several_tokens_a_sequence_are_not_decoded_by_single_token_attention():
    metadata = Step([2, 2], [8, 8], decoding=True).metadata
    assert (metadata.is_decoding, metadata.is_prefill_no_cache) == (False, False)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), ((3, 3), 0.0), (None, 5.0)])
def test_varlen_attention_passes_its_options_on(causal, window, cap):
    torch.manual_seed(0)
    lengths = torch.tensor([7, 1, 12])
    starts = lengths.cumsum(0) - lengths
    q, k, v = (torch.randn(20, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    spec = FlashAttentionBuildSpec(
        num_heads=HEADS,
        head_dim=SIZE,
        scale=None,
        num_kv_heads=KV_HEADS,
        v_head_dim=SIZE,
        causal=causal,
        sliding_window=window,
        logit_softcapping=cap,
    )
    out = VarlenAttention(spec).forward(q, k, v, starts, lengths, starts, lengths)
    sequences = zip(*(t.split(lengths.tolist()) for t in (q, k, v)), strict=True)
    expected = torch.cat(
        [
            dense(*one, causal=causal, window=None if window is None else window[0], cap=cap)
            for one in sequences
        ]
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
