"""Prefill attention in C++ against the op's reference in float64, over drawn shapes; and what its bits depend on."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.prefill_case import Case, Rules, assert_close
from tests.vendor.cpu.test_native import needs_compiler, resident_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 96  # keys, as kTileKeys in csrc/attention/panel.h


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]

bound = st.sampled_from([-1, -1, 0, 1, 30, 95, 96, 97, 1000])


@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.tuples(st.integers(0, 140), st.integers(0, 300)), min_size=0, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    block=st.sampled_from([1, 3, 16, 64, 300]),
    causal=st.booleans(),
    bounds=st.tuples(bound, bound),
    cap=st.sampled_from([0.0, 0.0, 3.0]),
    extras=st.tuples(st.booleans(), st.booleans()),
    scale=st.sampled_from([0.1, 0.1, 0.0, -0.2]),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, [(130, 130)], 2, 7, (64, 64), 64, True, (-1, -1), 0.0, (False, False), 0.125, 0)
@example(torch.float32, [(70, 200)], 1, 16, (576, 512), 16, True, (-1, -1), 0.0, (False, True), 0.04, 1)
@example(torch.bfloat16, [(70, 200)], 2, 1, (192, 128), 16, True, (-1, -1), 0.0, (False, False), 0.07, 1)
@example(
    torch.float16, [(1, 97), (1, 96), (1, 1)], 2, 1, (64, 64), 16, True, (40, -1), 0.0, (True, True), 0.1, 2
)
@settings(max_examples=120, deadline=None)
def test_it_is_the_reference(
    dtype, lengths, kv_heads, group, sizes, block, causal, bounds, cap, extras, scale, seed
) -> None:
    case = Case(seed, lengths, kv_heads, group, sizes, block, dtype)
    slopes, sinks = case.slopes if extras[0] else None, case.sinks if extras[1] else None
    left, right = bounds
    rules = Rules(scale, causal, left, right, cap, slopes, sinks)
    got = case.packed(rules)
    assert_close(got, case.reference(rules))
    assert torch.equal(case.paged(rules), got)


RULES = {
    "causal": Rules(0.125),
    "window": Rules(0.125, left=100),
    "all": Rules(0.125, causal=False),
    "cap": Rules(0.125, cap=5.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_sequence_has_the_same_bits_alone_and_with_any_number_of_threads(
    dtype: torch.dtype, rules: Rules
) -> None:
    case = Case(3, [(300, 300), (1, 700), (0, 5), (97, 400), (64, 64)], 2, 3, (64, 48), dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results += [case.packed(rules), case.paged(rules)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, results[0]) for one in results)
    start = 0
    for row, end in enumerate(case.ends.tolist()):
        assert torch.equal(
            case.alone(row).packed(rules, results[1][start:end].clone()), results[0][start:end]
        )
        start = end


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [-1, 100])
@pytest.mark.parametrize("chunk", [1, 37, TILE, 200])
def test_a_prefill_in_chunks_has_the_bits_of_one_in_a_piece(
    dtype: torch.dtype, left: int, chunk: int
) -> None:
    """So that what a prefix cache or the scheduler's chunk size does changes no result."""
    rules = Rules(0.125, left=left)
    whole = Case(4, [(300, 300)], 2, 3, (64, 64), dtype=dtype)
    want = whole.paged(rules)
    for begin in range(0, 300, chunk):
        end = min(begin + chunk, 300)
        part = whole.alone(0)
        part.q, part.kv_lens = whole.q[begin:end], torch.tensor([end])
        part.ends = torch.tensor([end - begin])
        assert torch.equal(part.paged(rules), want[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_v", [32, 24])
def test_the_result_may_go_where_the_query_lies(dtype: torch.dtype, size_v: int) -> None:
    case = Case(5, [(70, 70), (200, 250)], 2, 4, (32, size_v), dtype=dtype)
    want, before = case.paged(Rules()), case.q.clone()
    case.paged(Rules(), case.q[..., :size_v])
    assert torch.equal(case.q[:270, :, :size_v], want[:270])
    assert torch.equal(case.q[:270, :, size_v:], before[:270, :, size_v:])
    assert case.q[270:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_the_result_may_lie_where_other_heads_do(dtype: torch.dtype, shift: int) -> None:
    """A head is written as soon as its own query has been read, so of others' memory there is a copy."""
    case = Case(5, [(70, 70), (200, 250)], 2, 2, (32, 32), dtype=dtype)
    want = case.paged(Rules())[:270]
    memory = torch.full((len(case.q), 8, 32), torch.nan, dtype=dtype)
    memory[:, 2:6] = case.q
    for call in (case.packed, case.paged):
        shared = memory.clone()
        case.q = shared[:, 2:6]
        call(Rules(), shared[:, 2 - shift : 6 - shift])
        assert torch.equal(shared[:270, 2 - shift : 6 - shift], want)


def test_rows_behind_the_last_end_are_left_alone() -> None:
    case = Case(6, [(20, 20), (0, 9)], 1, 2, (16, 16))
    for out in (case.packed(Rules()), case.paged(Rules())):
        assert (out[20:] == 7.0).all()
        assert out[:20].isfinite().all()


@pytest.mark.parametrize(
    "rules", [Rules(causal=False, left=1, right=1), Rules(left=2), Rules(causal=False, left=0, right=3)]
)
def test_rows_between_two_that_see_little(rules: Rules) -> None:
    """More queries than keys, so that the first of a panel sees nothing and the last not the first key."""
    case = Case(0, [(5, 3), (40, 20), (7, 7)], 2, 2, (16, 16))
    assert_close(case.packed(rules), case.reference(rules))


@pytest.mark.parametrize(
    ("lengths", "rules", "blind"),
    [
        ([(5, 0), (4, 4)], Rules(), [*range(5)]),
        ([(8, 3)], Rules(), [*range(5)]),
        ([(3, 200)], Rules(causal=False, left=10, right=-1), []),
        ([(200, 3)], Rules(causal=False, right=2), [*range(195)]),
    ],
)
@pytest.mark.parametrize("sinks", [None, 0.0, -100.0])
def test_rows_that_see_no_key_are_zeros(lengths, rules: Rules, blind: list[int], sinks: float | None) -> None:
    """Beside a sink whose exponential is below the normal numbers, too."""
    case = Case(7, lengths, 1, 3, (16, 20))
    rules = rules._replace(sinks=None if sinks is None else case.sinks + sinks)
    got = case.paged(rules)
    seeing = [row for row in range(int(case.ends[-1])) if row not in blind]
    assert not got[blind].any()
    assert got[seeing].abs().amax(-1).all()
    assert_close(got, case.reference(rules))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_query_that_sees_one_key_has_its_value(dtype: torch.dtype) -> None:
    case = Case(15, [(200, 200)], 2, 3, (64, 48), dtype=dtype)
    assert torch.equal(case.packed(Rules(left=0))[:200], case.v[:200].repeat_interleave(3, 1))


def test_values_that_are_a_part_of_the_keys_and_heads_with_gaps() -> None:
    """As latent attention has them, and a cache whose heads lie apart."""
    case = Case(8, [(100, 300), (5, 5)], 1, 16, (72, 64))
    case.v = case.k[..., :64]
    want = case.packed(Rules())
    assert_close(want, case.reference(Rules()))
    wide = torch.full((case.k_cache.shape[0], 1, 16, 80), torch.nan)
    wide[..., :72] = case.k_cache.transpose(1, 2)
    case.k_cache = wide.transpose(1, 2)[..., :72]
    case.v_cache = case.k_cache[..., :64]
    assert torch.equal(case.paged(Rules()), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none(dtype: torch.dtype) -> None:
    """NaN in a key that is seen is NaN; keys that nothing likes (-inf) give zeros, as in the reference."""
    case = Case(9, [(40, 40), (40, 40), (40, 200)], 1, 2, (16, 16), dtype=dtype)
    case.q[40:] = case.q[40:].abs()
    case.k[30] = torch.nan
    case.k[40:80] = -torch.inf
    case.k[80 + 170] = torch.inf
    got, want = case.packed(Rules(1.0)), case.reference(Rules(1.0))
    assert torch.equal(got.isnan(), want.isnan())
    assert got[30:40].isnan().all()
    assert not got[40:80].any()
    assert_close(got[:30], want[:30])
    assert_close(got[80:90], want[80:90])


def test_large_scores_do_not_overflow() -> None:
    case = Case(10, [(50, 50)], 2, 2, (16, 16))
    case.q, case.k = case.q * 300, case.k * 300
    for cap in (0.0, 1e5):
        for sinks in (None, torch.full((4,), 1e4)):
            rules = Rules(1.0, cap=cap, sinks=sinks)
            got = case.packed(rules)
            assert got[:50].isfinite().all()
            torch.testing.assert_close(got.double(), case.reference(rules), rtol=1e-2, atol=1e-2)


def test_memory_is_that_of_a_tile_however_long_the_cache() -> None:
    """64 MiB of keys and values are read where they lie."""
    case = Case(11, [(8, 1 << 17)], 1, 4, (64, 64), 64)
    out, rules = case.empty(), Rules(0.1)
    before = resident_bytes()
    case.paged(rules, out)
    assert resident_bytes() - before < 8 << 20
    assert out[:8].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case.pages.__setitem__((1, 1), 99), "block index 99 of sequence 1"),
        (lambda case: case.pages.__setitem__((1, 1), -1), "block index -1 of sequence 1"),
        (lambda case: case.kv_lens.__setitem__(1, 49), "has 49 keys, and blocks for 48"),
        (lambda case: case.kv_lens.__setitem__(1, -1), "has -1 keys"),
        (lambda case: case.ends.__setitem__(1, 10), "which is not between 20 and"),
        (lambda case: case.ends.__setitem__(1, 44), "which is not between 20 and"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_written(change, message: str) -> None:
    case = Case(12, [(20, 20), (20, 30)], 1, 2, (16, 16))
    change(case)
    out = case.empty()
    with pytest.raises(RuntimeError, match=f"prefill.attention: .*{message}"):
        case.paged(Rules(), out)
    assert (out == 7.0).all()


def test_more_keys_than_there_are_is_refused() -> None:
    case = Case(13, [(20, 20)], 1, 2, (16, 16))
    case.kv_lens[0] = 23
    with pytest.raises(RuntimeError, match="sequences have 23 keys, and k has 22"):
        case.packed(Rules())


def test_a_page_that_no_query_sees_may_be_anything() -> None:
    case = Case(14, [(20, 300)], 1, 2, (16, 16))
    rules = Rules(left=50)
    want = case.paged(rules)
    case.pages[0, : (300 - 20 - 50) // 16] = -5
    assert torch.equal(case.paged(rules), want)
