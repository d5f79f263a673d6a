"""Attention: masks of every kind, causality, grouped heads, and caches that are written before they are read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphFallbackError
from tests.vendor.openvino.lowering import lowered, same


def heads(batch=3, q_heads=4, kv_heads=4, queries=5, keys=7, size=8):
    return [
        torch.randn(batch, count, length, size)
        for count, length in ((q_heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]


LARGER = heads(5, 4, 4, 9, 12)
ATTEND = F.scaled_dot_product_attention
# Sums over keys in another order, and another exponential.
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}
FIXED = (4, 2, 8)  # heads and head size


def test_without_a_mask():
    same(ATTEND, *heads(), others=[LARGER], fixed=FIXED, **CLOSE)
    same(lambda q, k, v: ATTEND(q, k, v, scale=0.3), *heads(), fixed=FIXED, **CLOSE)
    same(lambda q, k, v: ATTEND(q, k, v, is_causal=True), *heads(), others=[LARGER], fixed=FIXED, **CLOSE)
    same(lambda q, k, v: ATTEND(q[0], k[0], v[0]), *heads(), fixed=FIXED, **CLOSE)
    same(lambda q, k, v: ATTEND(q[0, 0], k[0, 0], v[0, 0], is_causal=True), *heads(), fixed=FIXED, **CLOSE)
    same(lambda q, k, v: ATTEND(q, k, v[..., :3].contiguous()), *heads(), fixed=FIXED, **CLOSE)


MASKS = {
    "bool": torch.rand(3, 1, 5, 7) > 0.3,
    "bool for all": torch.rand(5, 7) > 0.3,
    "bool a head": torch.rand(3, 4, 5, 7) > 0.3,
    "bool a key": torch.rand(3, 1, 1, 7) > 0.3,
    "bool a key of a head": torch.rand(3, 4, 1, 7) > 0.3,
    "added": torch.randn(3, 1, 5, 7),
    "lowest": torch.where(torch.rand(3, 1, 5, 7) > 0.3, 0.0, torch.finfo(torch.float32).min),
    "infinite": torch.where(torch.rand(3, 1, 5, 7) > 0.3, 0.0, -torch.inf),
}
MASKS["bool"][1, 0, 2] = False  # a query that sees no key: torch gives zeros
MASKS["infinite"][0, 0, 3] = -torch.inf
MASKS["no number"] = torch.zeros(3, 1, 5, 7)
MASKS["no number"][0, 0, 3] = torch.nan
MASKS["no number"][1, 0, 2, 5] = torch.nan


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_masks(kind, kv_heads):
    def attend(q, k, v, mask):
        return ATTEND(q, k, v, mask, enable_gqa=kv_heads < 4)

    same(attend, *heads(kv_heads=kv_heads), MASKS[kind], fixed=FIXED, **CLOSE)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_grouped_heads(kv_heads):
    def attend(q, k, v):
        return ATTEND(q, k, v, enable_gqa=True), ATTEND(q, k, v, is_causal=True, enable_gqa=True)

    same(attend, *heads(kv_heads=kv_heads), others=[heads(5, 4, kv_heads, 11, 3)], fixed=FIXED, **CLOSE)
    same(attend, *heads(kv_heads=kv_heads, queries=1), fixed=FIXED, **CLOSE)


def test_bfloat16():
    same(lambda q, k, v: ATTEND(q, k, v, is_causal=True), *(one.bfloat16() for one in heads()), fixed=FIXED)


# --- caches


def step(q, k, v, keys, values, where, mask):
    """What transformers' static cache does at each layer."""
    keys.index_copy_(2, where, k)
    values.index_copy_(2, where, v)
    return ATTEND(q, keys, values, mask, enable_gqa=q.shape[1] != k.shape[1])


def cached(new, q_heads, kv_heads, length, start):
    q, k, v = heads(2, q_heads, kv_heads, new, new)
    keys, values = (torch.randn(2, kv_heads, length, 8) for _ in range(2))
    where = torch.arange(start, start + new)
    mask = torch.arange(length) <= where[:, None]
    return q, k, v, keys, values, where, mask[None, None]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("new", [1, 5])
def test_a_cache_is_written_in_place_and_read_where_it_lies(kv_heads, new):
    args = cached(new, 4, kv_heads, 16, 3)
    compiled, report = lowered(step, *args, fixed=FIXED)
    assert report.regions[0].notes == []  # nothing is copied
    for given in (args, cached(new, 4, kv_heads, 21, 8)):
        expected = [one.clone() for one in given]
        places = [one.data_ptr() for one in given]
        torch.testing.assert_close(compiled(*given)[0], step(*expected), **CLOSE)
        for one, other in zip(given, expected, strict=True):
            assert torch.equal(one, other)
        assert [one.data_ptr() for one in given] == places


def test_several_steps_over_one_cache():
    args = cached(1, 4, 2, 12, 0)
    compiled, _ = lowered(step, *args, fixed=FIXED)
    ours, theirs = args[3:5], [one.clone() for one in args[3:5]]
    for place in range(12):
        q, k, v, _, _, where, mask = cached(1, 4, 2, 12, place)
        (got,) = compiled(q, k, v, *ours, where, mask)
        torch.testing.assert_close(got, step(q, k, v, theirs[0], theirs[1], where, mask), **CLOSE)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("unused", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("new", [1, 16], ids=["decode", "prefill"])
def test_what_the_cache_held_before_leaves_no_trace(new, unused):
    """As memory of torch.empty: what is written over is not multiplied by 0."""
    q, k, v, keys, values, where, mask = cached(new, 4, 2, 16, 16 - new)
    compiled, _ = lowered(step, q, k, v, keys, values, where, mask, fixed=FIXED, fallback="allow")
    for cache in (keys, values):
        cache[:, :, where] = unused
    expected = step(q, k, v, keys.clone(), values.clone(), where, mask)
    assert expected.isfinite().all()
    torch.testing.assert_close(compiled(q, k, v, keys, values, where, mask)[0], expected, **CLOSE)
    assert torch.equal(values[:, :, where], v)


def test_a_cache_of_unused_memory_is_a_fallback_that_is_counted():
    args = cached(1, 4, 2, 12, 3)
    compiled, _ = lowered(step, *args, fixed=FIXED)
    args[4][:, :, 3] = torch.nan
    with pytest.raises(GraphFallbackError, match="old content of KV cache slots that the call writes"):
        compiled(*args)


def test_a_place_that_is_written_twice_counts_once():
    """torch takes either row; here both are the same."""
    q, k, v, keys, values, _, mask = cached(4, 4, 2, 16, 3)
    where = torch.tensor([5, 6, 6, 7])
    for one in (k, v):
        one[:, :, 2] = one[:, :, 1]
    args = q, k, v, keys, values, where, mask
    compiled, _ = lowered(step, *args, fixed=FIXED, fallback="allow")
    expected = step(q, k, v, keys.clone(), values.clone(), where, mask)
    torch.testing.assert_close(compiled(*args)[0], expected, **CLOSE)


def test_a_cache_that_is_read_otherwise_is_copied_and_said_so():
    def total(k, keys, where):
        keys.index_copy_(2, where, k)
        return keys.sum((0, 2))

    _, k, _, keys, _, where, _ = cached(3, 4, 2, 16, 3)
    same(total, k, keys, where, fixed=FIXED, rtol=1e-4, atol=1e-4)
    _, report = lowered(total, k, keys, where, fixed=FIXED)
    (note,) = report.regions[0].notes
    assert "copied at each call" in note


WRITES = {
    "a slice": lambda cache, new, at: cache[:, :, 2:5].copy_(new),
    "a slice from the end": lambda cache, new, at: cache[:, :, -3:].copy_(new),
    "places": lambda cache, new, at: cache.__setitem__((slice(None), slice(None), at), new),
    "one place": lambda cache, new, at: cache[:, :, 4].copy_(new[:, :, 0]),
    "rows": lambda cache, new, at: cache.index_copy_(2, at, new),
}


@pytest.mark.parametrize("how", WRITES)
def test_rows_of_an_input_are_written_without_copying_it(how):
    def write(cache, new, at):
        WRITES[how](cache, new * 2, at)
        return new + 1

    cache, new, at = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 3, 4), torch.tensor([7, 1, 5])
    same(write, cache, new, at, others=[(torch.randn(2, 3, 14, 4), new, at)])
    _, report = lowered(write, cache, new, at)
    assert report.regions[0].notes == []
