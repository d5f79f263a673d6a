"""Decode attention in C++ against the op's reference in float64, over drawn shapes; and what its bits depend on."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops
from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import needs_compiler

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


class Case:
    """A batch over pages in random order; slots that hold no key are NaN."""

    def __init__(
        self, seed: int, lengths: list[int], kv_heads: int, group: int, sizes: tuple[int, int], block: int
    ):
        draw = torch.Generator().manual_seed(seed)
        size, size_v = sizes
        columns = max(1, -(-max(lengths, default=1) // block))
        count = len(lengths) * columns
        shape = (count + 2, block, kv_heads)
        self.k = torch.randn(*shape, size, generator=draw)
        self.v = torch.randn(*shape, size_v, generator=draw)
        self.pages = torch.randperm(count + 2, generator=draw)[:count].view(len(lengths), columns)
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        self.q = torch.randn(len(lengths), kv_heads * group, size, generator=draw)
        self.slopes = torch.rand(kv_heads * group, generator=draw)
        self.sinks = torch.randn(kv_heads * group, generator=draw)
        self.block = block
        written = torch.zeros(count + 2, block, dtype=torch.bool)
        for row, length in zip(self.pages.tolist(), lengths, strict=True):
            for column, page in enumerate(row):
                written[page, : max(0, min(block, length - column * block))] = True
        self.k[~written], self.v[~written] = torch.nan, torch.nan

    def native(
        self, dtype: torch.dtype, scale: float, window: int, cap: float, *extras: Tensor | None
    ) -> Tensor:
        q, k, v = (one.to(dtype) for one in (self.q, self.k, self.v))
        out = torch.full((*q.shape[:2], v.shape[3]), torch.nan, dtype=dtype)
        torch.ops.dlinfer_cpu.paged_decode_attention(
            q, k, v, self.pages, self.lengths, out, scale, window, cap, *extras
        )
        return out

    def reference(
        self, dtype: torch.dtype, scale: float, window: int, cap: float, *extras: Tensor | None
    ) -> Tensor:
        q, k, v = (one.to(dtype).double() for one in (self.q, self.k, self.v))
        out = torch.full((*q.shape[:2], v.shape[3]), torch.nan, dtype=torch.float64)
        given = (q, k, v, self.pages, self.block, self.lengths, 1 << 20, q.shape[1], k.shape[2], out)
        ops.paged_decode_attention.reference(*given, scale, window, cap, *extras)
        return out


def assert_close(got: Tensor, want: Tensor) -> None:
    tolerance = ops.paged_decode_attention.tolerances[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance.rtol, atol=tolerance.atol)


@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 700), min_size=0, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 17),
    sizes=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    block=st.sampled_from([1, 3, 16, 64, 300]),
    window=st.sampled_from([-1, 0, 1, 100, 255, 256, 10_000]),
    cap=st.sampled_from([0.0, 3.0]),
    extras=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, [512, 1, 0], 2, 7, (64, 64), 64, -1, 0.0, (False, False), 0)
@example(torch.float32, [256, 257, 255], 1, 16, (576, 512), 16, -1, 0.0, (False, True), 1)
@example(torch.bfloat16, [301], 1, 128, (576, 512), 64, -1, 0.0, (False, False), 2)
@settings(max_examples=60)
def test_it_is_the_reference(
    dtype, lengths, kv_heads, group, sizes, block, window, cap, extras, seed
) -> None:
    case = Case(seed, lengths, kv_heads, group, sizes, block)
    given = (case.slopes if extras[0] else None, case.sinks if extras[1] else None)
    scale = sizes[0] ** -0.5
    assert_close(
        case.native(dtype, scale, window, cap, *given), case.reference(dtype, scale, window, cap, *given)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_alone_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    case = Case(3, [700, 1, 300, 513], 2, 3, (64, 48), 16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(case.native(dtype, 0.125, -1, 0.0, None, None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, results[0]) for one in results)
    whole = results[0]
    for row in range(4):
        alone = Case(3, [700, 1, 300, 513], 2, 3, (64, 48), 16)
        alone.q, alone.pages = alone.q[row : row + 1], alone.pages[row : row + 1]
        alone.lengths = alone.lengths[row : row + 1]
        assert torch.equal(alone.native(dtype, 0.125, -1, 0.0, None, None)[0], whole[row])


@pytest.mark.parametrize("group", [1, 3, 7, 20])
def test_values_that_are_all_the_same_are_the_result(group: int) -> None:
    """Weights that are rounded to bfloat16 are divided by the sum of the rounded ones."""
    case = Case(4, [333, 7], 2, group, (64, 80), 16)
    case.v[~case.v.isnan()] = 1.0
    got = case.native(torch.bfloat16, 0.125, -1, 0.0, None, None)
    assert torch.equal(got, torch.ones_like(got))


def test_the_result_may_go_where_the_query_lies() -> None:
    case = Case(5, [70, 600], 2, 4, (32, 24), 16)
    want = case.native(torch.float32, 0.2, -1, 0.0, None, None)
    q = case.q.clone()
    given = (q, case.k, case.v, case.pages.int(), case.lengths.int(), q[..., :24])
    torch.ops.dlinfer_cpu.paged_decode_attention(*given, 0.2, -1, 0.0, None, None)
    assert torch.equal(q[..., :24], want)
    assert torch.equal(q[..., 24:], case.q[..., 24:])


def test_values_that_are_a_part_of_the_keys_and_heads_with_gaps() -> None:
    """As latent attention has them, and a cache whose heads lie apart."""
    case = Case(6, [300, 5], 1, 16, (72, 64), 16)
    case.v = case.k[..., :64]
    assert_close(
        case.native(torch.float32, 0.1, -1, 0.0, None, None),
        case.reference(torch.float32, 0.1, -1, 0.0, None, None),
    )
    wide = torch.randn(case.k.shape[0], 1, 16, 80)
    wide[..., :72] = case.k.transpose(1, 2)
    out = torch.empty(2, 16, 64)
    k = wide.transpose(1, 2)[..., :72]
    torch.ops.dlinfer_cpu.paged_decode_attention(
        case.q, k, k[..., :64], case.pages, case.lengths, out, 0.1, -1, 0.0, None, None
    )
    assert torch.equal(out, case.native(torch.float32, 0.1, -1, 0.0, None, None))


def test_numbers_that_are_none() -> None:
    """NaN in a key that is seen is NaN; keys that nothing likes (-inf) give zeros, as in the reference."""
    case = Case(7, [40, 40, 40], 1, 2, (16, 16), 16)
    case.k[case.pages[0, 1], 3] = torch.nan
    case.q[1] = 1.0
    case.k[case.pages[1]] = -torch.inf
    case.k[case.pages[2, 0], 0] = torch.inf
    case.q[2] = 1.0
    got = case.native(torch.float32, 1.0, -1, 0.0, None, None)
    want = case.reference(torch.float32, 1.0, -1, 0.0, None, None)
    assert got[0].isnan().all()
    assert want[0].isnan().all()
    assert torch.equal(got[1], torch.zeros(2, 16))
    assert torch.equal(got[2].isnan(), want[2].isnan())


@pytest.mark.parametrize(("page", "length"), [(99, 20), (-1, 20), (0, 33), (0, -1)])
def test_pages_and_lengths_outside_are_refused_before_anything_is_written(page: int, length: int) -> None:
    case = Case(8, [20, 20], 1, 2, (16, 16), 16)
    case.pages[1, 1], case.lengths[1] = page, length
    out = torch.full((2, 2, 16), 7.0)
    given = (case.q, case.k, case.v, case.pages, case.lengths, out)
    with pytest.raises(RuntimeError, match="paged_decode_attention: "):
        torch.ops.dlinfer_cpu.paged_decode_attention(*given, 1.0, -1, 0.0, None, None)
    assert (out == 7.0).all()


def test_a_page_that_is_not_read_may_be_anything() -> None:
    case = Case(9, [20, 4], 1, 2, (16, 16), 16)
    want = case.native(torch.float32, 1.0, -1, 0.0, None, None)
    case.pages[1, 1] = -5
    assert torch.equal(case.native(torch.float32, 1.0, -1, 0.0, None, None), want)
