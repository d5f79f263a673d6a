"""Writes in place: what is written lies where torch has it, KV caches are never copied."""

from typing import Any

import pytest
import torch

from dlinfer.graph.functional.functionalize import function_of
from dlinfer.graph.onnx.export import export
from dlinfer.ops import fill_kv_cache
from dlinfer.vendor import KVCacheLayout, Probe, Vendor, discovery
from dlinfer.vendor.onnxruntime.feeds import Feed
from dlinfer.vendor.onnxruntime.model import safe_in_place
from tests.vendor.onnxruntime.regions import as_in_eager, compiled, subgraph


def cached_step(cache, new, at):
    cache.index_copy_(2, at, new)
    return cache.sum(-1)


def written_through_views(cache, new, at):
    cache[:, 1].copy_(new[:, 0])
    cache[0, :, :2].mul_(2)
    return cache * 2


def counted(length, x):
    places = length + torch.arange(x.shape[0])
    length.add_(x.shape[0])
    return places


def masked(cache, mask):
    return cache.masked_fill_(mask, 0.0)


def scattered(cache, ids, new):
    cache.scatter_(1, ids, new)
    cache.index_put_((ids[:, 0],), new)
    return cache


def of_other_sizes(x, row, number):
    """Copies into tensors of the graph's own, which become values."""
    whole, rows, counted = x * 2, x + 1, (x * 4).to(torch.int64)
    whole.copy_(number)
    rows.copy_(row)
    counted.copy_(number)
    return whole.sum(), rows.sum(0), counted.sum(), whole


X = torch.randn
CASES = {
    "index_copy": (cached_step, lambda n: (X(2, 3, 9, 4), X(2, 3, n, 4), torch.arange(n) * 2)),
    "through views": (written_through_views, lambda n: (X(2, 3, 9, 4), X(2, 3, 9, 4), torch.arange(n))),
    "a counter that is read before": (counted, lambda n: (torch.tensor(5), X(n, 2))),
    "copies of other sizes": (of_other_sizes, lambda n: (X(n, 4), X(4), torch.tensor(2.5))),
    "masked_fill": (masked, lambda n: (X(n, 4), torch.rand(n, 4) > 0.5)),
    "scatter": (scattered, lambda n: (X(n + 4, 6), torch.randint(6, (n, 6)), X(n, 6))),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_eager_writes(case):
    function, make = CASES[case]
    run: Any = compiled(function, *make(3)).run
    for size in (3, 2, 4):
        as_in_eager(run, function, *make(size))


@pytest.fixture(params=["BSHD", "BHSD", "SBHD", "HBSD"])
def layout(request, monkeypatch):
    """Caches lie as the active vendor says, another one each time."""
    lies = KVCacheLayout(request.param)
    made = Vendor("other", "cpu", "", lambda: Probe(True, ""), dict, kv_cache_layout=lies, is_reference=True)
    monkeypatch.setitem(discovery._loaded, "other", made)
    discovery.use("other")
    yield
    discovery.use("cpu")


@pytest.mark.usefixtures("layout")
def test_fill_kv_cache_writes_as_the_active_vendor_lays_caches_out():
    """Blocks, slots and heads are as many, so that a cache of any layout has the same sizes."""

    def function(k, v, k_cache, v_cache, slots):
        fill_kv_cache(k, v, k_cache, v_cache, slots)
        return k * 2

    def make(tokens):
        return X(tokens, 8, 4), X(tokens, 8, 4), X(8, 8, 8, 4), X(8, 8, 8, 4), torch.randperm(64)[:tokens]

    run: Any = compiled(function, *make(5)).run
    assert run.lowered.in_place == {2, 3}
    for tokens in (5, 3):
        as_in_eager(run, function, *make(tokens))


def test_fill_kv_cache_leaves_padding_out():
    def function(k, v, k_cache, v_cache, slots):
        fill_kv_cache(k, v, k_cache, v_cache, slots)
        return k * 2

    def make(tokens):
        slots = torch.randperm(32)[:tokens]
        slots[0] = -1
        return X(tokens, 2, 8), X(tokens, 2, 4), X(4, 8, 2, 8), X(4, 8, 2, 4), slots

    run: Any = compiled(function, *make(5)).run
    for tokens in (5, 3):
        as_in_eager(run, function, *make(tokens))


def test_a_cache_is_bound_and_not_copied():
    """The session writes into the very memory that it reads, and nothing of the cache's size is made at a call."""
    cache, new, at = CASES["index_copy"][1](3)
    run: Any = compiled(cached_step, cache, new, at).run
    assert run.lowered.in_place == {0}
    address = cache.data_ptr()
    made = []
    empty = torch.empty

    def counting(*args, **kwargs):
        made.append(empty(*args, **kwargs))
        return made[-1]

    torch.empty = counting
    try:
        run(cache, new, at)
    finally:
        torch.empty = empty
    assert cache.data_ptr() == address
    assert [tuple(one.shape) for one in made] == [(2, 3, 9)]  # the sum alone
    (binding,) = run._run._free
    addresses = {name: place for name, (place, _) in binding.bound.items()}
    assert list(addresses.values()).count(address) == 2  # as an input, and as a result


def test_memory_of_a_content_that_others_read_is_not_shared():
    """ONNX Runtime may run the node that writes before one that reads what was there."""
    function, make = CASES["a counter that is read before"]
    run: Any = compiled(function, *make(3)).run
    assert run.lowered.in_place == frozenset()


def test_only_nodes_that_read_where_they_write_may_write_in_place():
    def reversed_into(cache, other):
        cache.copy_(cache.flip(0))
        return other + 1

    def added(cache, other):
        cache.add_(other)
        return other + 1

    for function, safe in ((reversed_into, set()), (added, {0})):
        made = function_of(subgraph(function, X(4, 4), X(4, 4)))
        feeds = [Feed(index) for index in range(2)]
        assert safe_in_place(export(made.graph_module), feeds, made.writes) == safe


def test_a_written_input_that_is_not_contiguous():
    def function(cache, other):
        cache.add_(other)
        return cache * 2

    def make():
        return X(6, 4).t(), X(4, 6)

    run: Any = compiled(function, *make()).run
    ours, other = make()
    theirs = ours.clone()
    base = ours
    given = run(ours, other)
    torch.testing.assert_close(base, theirs + other)
    torch.testing.assert_close(given[0], (theirs + other) * 2)


def test_inputs_that_share_written_memory_run_by_torch():
    def function(cache, other):
        cache.add_(1)
        return other * 2

    result = compiled(function, X(4, 4), X(4, 4), fallback="allow")
    memory = X(5, 4)
    expected = memory.clone()
    expected[:4].add_(1)
    (given,) = result.run(memory[:4], memory[1:])
    torch.testing.assert_close(memory, expected)
    torch.testing.assert_close(given, expected[1:] * 2)
    assert any("share memory" in note for note in result.notes)
    apart = X(4, 4)
    (given,) = result.run(X(4, 4), apart)  # and the session again for a call that it fits
    torch.testing.assert_close(given, apart * 2)


@pytest.mark.usefixtures("graph_mode")
@torch.no_grad()
@pytest.mark.parametrize("source", [0.5, 2, torch.tensor(0.5), torch.arange(4.0)])
def test_a_copy_into_a_fresh_tensor_has_its_sizes(source):
    def filled(x):
        y = x * 2
        y.copy_(source)
        return y.sum(0), y

    options: dict[str, Any] = {"engine": "onnxruntime", "small_regions": "engine", "fallback": "error"}
    run, x = torch.compile(filled, backend="dlinfer", options=options), torch.randn(3, 4)
    for got, want in zip(run(x), filled(x), strict=True):
        assert torch.equal(got, want)
