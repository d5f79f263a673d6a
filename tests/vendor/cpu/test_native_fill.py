"""Cache writes in C++ against the op's reference, bit for bit; memory beside the written slots stays as it was."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops
from dlinfer.errors import OpArgumentError
from dlinfer.ops import fallback
from dlinfer.vendor.cpu import compiled, native
from tests.vendor.cpu.test_native import needs_compiler

SLOTS = torch.tensor([1, 0])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


def strided(generator: torch.Generator, shape: tuple[int, ...], how: str, dtype: torch.dtype) -> Tensor:
    """Numbers of this shape: one after the other, as a part of a wider tensor, or with dimensions in another order."""
    if how == "part":
        wide = torch.randn(*shape[:-1], 3 * shape[-1], generator=generator).to(dtype)
        return wide[..., shape[-1] : 2 * shape[-1]]
    if how == "turned":
        return (
            torch.randn(*reversed(shape), generator=generator).to(dtype).permute(*reversed(range(len(shape))))
        )
    return torch.randn(*shape, generator=generator).to(dtype)


LAYOUTS = st.sampled_from(["dense", "part", "turned"])


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 40), st.integers(1, 3)),  # tokens, heads
    st.tuples(st.sampled_from([1, 7, 64]), st.sampled_from([1, 16, 40])),
    st.sampled_from([1, 4, 64]),
    st.tuples(LAYOUTS, LAYOUTS),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([1, 2, 5]),
)
@example(0, torch.bfloat16, (0, 2), (64, 64), 64, ("dense", "dense"), torch.int64, 2)
@example(1, torch.bfloat16, (1, 2), (64, 64), 64, ("part", "dense"), torch.int64, 2)
@example(2, torch.float32, (700, 4), (64, 40), 64, ("part", "dense"), torch.int64, 5)
def test_each_slot_gets_its_token_and_others_nothing(
    seed, dtype, counts, sizes, block, layouts, kind, threads
):
    (tokens, heads), draw = counts, torch.Generator().manual_seed(seed)
    blocks = tokens // block + 2
    k, v = (strided(draw, (tokens, heads, size), layouts[0], dtype) for size in sizes)
    caches = [strided(draw, (blocks, block, heads, size), layouts[1], dtype) for size in sizes]
    slots = torch.randperm(blocks * block, generator=draw)[:tokens].to(kind)
    slots[torch.rand(tokens, generator=draw) < 0.2] = -1
    expected = [cache.clone() for cache in caches]
    ops.fill_kv_cache.reference(k, v, *expected, slots)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.ops.dlinfer_cpu.fill_kv_cache(k, v, *caches, slots) == -1
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, caches, expected))


def given_call(slots: list[int]) -> tuple[Tensor, ...]:
    k, v = torch.randn(2, len(slots), 2, 8)
    k_cache, v_cache = torch.full((2, 3, 4, 2, 8), torch.nan)
    return k, v, k_cache, v_cache, torch.tensor(slots)


def test_slots_that_are_views_and_caches_full_of_nan():
    k, v, k_cache, v_cache, slots = given_call([3, 9, 5])
    ops.fill_kv_cache(k, v, k_cache, v_cache, torch.stack([slots, slots * 100], 1)[:, 0])
    assert torch.equal(k_cache.view(12, 2, 8)[slots], k)
    assert torch.equal(v_cache.view(12, 2, 8)[slots], v)
    assert k_cache.isnan().sum() == v_cache.isnan().sum() == 9 * 16


def test_a_slot_behind_the_end_is_refused_before_anything_is_written():
    call = given_call([0, 12, 1])
    with pytest.raises(OpArgumentError, match="slots below 12"):
        ops.fill_kv_cache(*call)
    assert call[2].isnan().all() and call[3].isnan().all()


def test_values_that_are_a_view_of_keys():
    k, _, k_cache, _, slots = given_call([2, 7])
    ops.fill_kv_cache(k, k[..., :5], k_cache, k_cache[..., :5], slots)
    assert torch.equal(k_cache.view(12, 2, 8)[slots], k)


def test_it_is_the_kernel_of_the_op_in_three_dtypes(monkeypatch):
    called = []
    real = compiled._kernels.get("fill_kv_cache") or torch.ops.dlinfer_cpu.fill_kv_cache.default

    def noted(*args):
        called.append(args[0].dtype)
        return real(*args)

    calls = [
        (*(one.to(dtype) for one in given_call([1, 0])[:4]), SLOTS) for dtype in (*DTYPES, torch.float64)
    ]
    for call in calls:
        ops.fill_kv_cache(*call)
    monkeypatch.setitem(compiled._kernels, "fill_kv_cache", noted)
    fallback.reset()
    for call in calls:
        ops.fill_kv_cache(*call)
    assert called == list(DTYPES)
    assert not fallback.counts()


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": torch.tensor([[0, 1]])},
        {"slots": torch.tensor([0.0, 1.0])},
        {"slots": torch.tensor([0])},
        {"k": torch.zeros(2, 3, 8)},
        {"v": torch.zeros(2, 2, 7)},
        {"v": torch.zeros(2, 2, 8).half()},
        {"v_cache": torch.zeros(3, 5, 2, 8)},
        {"k": torch.zeros(2, 2, 8).double(), "k_cache": torch.zeros(3, 4, 2, 8).double()},
    ],
    ids=lambda one: " ".join(f"{name} {list(value.shape)}" for name, value in one.items()),
)
def test_what_does_not_fit_is_refused(wrong):
    call = dict(zip(("k", "v", "k_cache", "v_cache", "slots"), given_call([0, 1]), strict=True))
    with pytest.raises(RuntimeError, match="fill_kv_cache"):
        torch.ops.dlinfer_cpu.fill_kv_cache(**(call | wrong))
