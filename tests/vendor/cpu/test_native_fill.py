"""Keys and values copied in C++ to their slots, against the op's reference: every byte, and none beside."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops
from dlinfer.errors import OpArgumentError
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.attention import kv_cache
from tests.vendor.cpu.test_native import needs_compiler, tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


def fill(*given_: Tensor) -> None:
    torch.ops.dlinfer_cpu.fill_kv_cache.default(*given_)


def permuted(shape: list[int], order: list[int], dtype: torch.dtype) -> Tensor:
    """Zeros whose dimensions lie in memory in this order, with a gap."""
    wide = torch.zeros([shape[d] for d in order[:-1]] + [shape[order[-1]] + 3], dtype=dtype)
    return wide[..., : shape[order[-1]]].permute([order.index(d) for d in range(4)])


@given(
    dtype=st.sampled_from(DTYPES),
    blocks=st.integers(1, 9),
    block_size=st.sampled_from([1, 3, 16]),
    heads=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    order=st.permutations([0, 1, 2, 3]),
    padding=st.integers(0, 3),
    narrow=st.booleans(),
    gap=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_it_is_the_reference(
    dtype, blocks, block_size, heads, sizes, order, padding, narrow, gap, seed
) -> None:
    draw = torch.Generator().manual_seed(seed)
    free = blocks * block_size
    slots = torch.randperm(free, generator=draw)[: int(torch.randint(0, free + 1, (), generator=draw))]
    slots = torch.cat([slots, torch.full((padding,), -1)])
    slots = slots[torch.randperm(slots.numel(), generator=draw)].to(torch.int32 if narrow else torch.int64)
    k, v = (tensor(seed + i, (slots.numel(), heads, sizes[i]), dtype, gap) for i in range(2))
    caches, wanted = (
        [permuted([blocks, block_size, heads, size], order, dtype) for size in sizes] for _ in range(2)
    )
    fill(k, v, *caches, slots)
    ops.fill_kv_cache.reference(k, v, *wanted, slots)
    for got, want in zip(caches, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_tokens_of_all_threads(threads: int) -> None:
    k, v = tensor(0, (700, 4, 64), torch.bfloat16), tensor(1, (700, 4, 48), torch.bfloat16)
    caches = torch.zeros(50, 16, 4, 64).bfloat16(), torch.zeros(50, 16, 4, 48).bfloat16()
    slots = torch.randperm(800)[:700]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        fill(k, v, *caches, slots)
    finally:
        torch.set_num_threads(before)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache.flatten(0, 1)[slots], new)
        rest = torch.ones(800, dtype=torch.bool).index_fill_(0, slots, False)
        assert not cache.flatten(0, 1)[rest].any()


def test_nan_is_copied_bit_by_bit() -> None:
    k = torch.full((1, 1, 4), 0x7FC1, dtype=torch.int16).view(torch.bfloat16)
    cache = torch.zeros(1, 2, 1, 4, dtype=torch.bfloat16)
    fill(k, k, cache, cache.clone(), torch.tensor([1]))
    assert torch.equal(cache.view(torch.int16)[0, 1], k.view(torch.int16)[0])


def test_values_that_are_a_part_of_the_keys() -> None:
    latent, cache = tensor(0, (5, 1, 24), torch.float32), torch.zeros(4, 8, 1, 24)
    slots = torch.tensor([3, 31, 0, 17, 8])
    fill(latent, latent[..., :16], cache, cache[..., :16], slots)
    assert torch.equal(cache.flatten(0, 1)[slots], latent)


@pytest.mark.parametrize("bad", [32, 1 << 40])
def test_a_slot_behind_the_end_is_refused_before_anything_is_written(bad: int) -> None:
    k, caches = tensor(0, (3, 2, 8), torch.float32), [torch.zeros(4, 8, 2, 8) for _ in range(2)]
    slots = torch.tensor([1, 2, bad])
    with pytest.raises(RuntimeError, match=f"fill_kv_cache: slot {bad}"):
        fill(k, k, *caches, slots)
    with pytest.raises(OpArgumentError, match="slots below 32"):
        ops.fill_kv_cache(k, k, *caches, slots)
    assert not caches[0].any()
    assert not caches[1].any()


def test_sizes_that_do_not_fit_are_refused() -> None:
    k, cache, slots = torch.ones(3, 2, 8), torch.zeros(4, 8, 2, 8), torch.arange(3)
    for call in (
        (k, k[:2], cache, cache, slots),
        (k, k, cache[..., :4], cache, slots),
        (k, k, cache[:, :, :1], cache, slots),
        (k, k, cache, cache[:3], slots),
        (k, k, cache.bfloat16(), cache, slots),
        (k, k, cache, cache, slots[:2]),
        (k, k, cache, cache, slots.float()),
        (k.double(), k.double(), cache.double(), cache.double(), slots),
    ):
        with pytest.raises(RuntimeError, match="fill_kv_cache: "):
            fill(*call)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_the_library_torch_copies(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "compiled", lambda *given_: None)
    k, caches = tensor(0, (3, 2, 8), dtype), [torch.zeros(4, 8, 2, 8, dtype=dtype) for _ in range(2)]
    kv_cache.fill_kv_cache(k, k, caches[0], caches[1], torch.tensor([9, -1, 30]))
    assert torch.equal(caches[0].flatten(0, 1)[[9, 30]], k[[0, 2]])


def test_opcheck() -> None:
    k, cache = torch.randn(3, 2, 8), torch.zeros(4, 8, 2, 8)
    torch.library.opcheck(
        torch.ops.dlinfer_cpu.fill_kv_cache.default, (k, k, cache, cache.clone(), torch.arange(3))
    )
