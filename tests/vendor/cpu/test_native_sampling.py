"""The next tokens in C++: the largest logit as torch's argmax has it, draws against float64 over sorted rows."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.sampling_oracle import Limits, may_be_drawn
from tests.vendor.cpu.test_native import needs_compiler

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABULARY = 151_936
BLOCK, GROUP = 512, 4096  # kBlock and kGroup of them in csrc/sampling/row.h
# exp within two units of float32's last place, and sums of a block's numbers, in lanes, within some more.
ROUNDING = 2e-6
OFF = Limits()


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


def largest(logits: Tensor) -> Tensor:
    return torch.ops.dlinfer_cpu.largest_tokens.default(logits)


def draw(logits: Tensor, numbers: Tensor, limits: Limits = OFF) -> Tensor:
    """With the same limits for all rows; those that are off are not given."""
    rows = len(logits)
    top_k = torch.full((rows,), limits.top_k) if limits.top_k > 0 else None
    top_p = torch.full((rows,), limits.top_p) if limits.top_p < 1 else None
    min_p = torch.full((rows,), limits.min_p) if limits.min_p > 0 else None
    return torch.ops.dlinfer_cpu.drawn_tokens.default(logits, numbers, top_k, top_p, min_p)


def rows_of(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator) * scale).to(dtype)


def uniform(seed: int, rows: int) -> Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed))


def assert_drawn(logits: Tensor, numbers: Tensor, limits: Limits = OFF) -> None:
    drawn = draw(logits, numbers, limits)
    assert drawn.dtype == torch.int64
    assert drawn.shape == logits.shape[:1]
    for row, number, token in zip(logits, numbers.tolist(), drawn.tolist(), strict=True):
        expected = may_be_drawn(row, number, limits, ROUNDING)
        assert token in expected, f"{token} is none of {expected.tolist()} for {number} under {limits}"


# --- the largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 16, BLOCK - 1, BLOCK, BLOCK + 1, GROUP, GROUP + 17, VOCABULARY])
def test_the_largest_is_torchs(dtype, width):
    logits = rows_of(width, 5, width, dtype)
    assert torch.equal(largest(logits), logits.argmax(-1))


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 5),
    width=st.integers(1, 1200),
    special=st.lists(
        st.tuples(
            st.integers(0, 10_000), st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 99.0])
        ),
        max_size=6,
    ),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_the_largest_among_ties_nan_and_infinities(dtype, rows, width, special, seed):
    # Whole numbers, so that there are ties; torch takes the first of them, and NaN for the largest.
    logits = rows_of(seed, rows, width, dtype).round()
    for place, value in special if rows else ():
        logits.view(-1)[place % logits.numel()] = value
    assert torch.equal(largest(logits), logits.argmax(-1))


# --- draws


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 3),
    width=st.one_of(st.integers(1, 60), st.integers(1, 6000)),
    scale=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 3.0, 30.0, 300.0]),
    whole=st.booleans(),
    top_k=st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 7000)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 2, 5000, 0.0, False, 0, 1.0, 0.0, 1)
@example(torch.float32, 2, 5000, 0.3, True, 3000, 0.5, 0.0, 1)
@settings(max_examples=400, deadline=None)
def test_draws_are_those_of_a_sorted_row(dtype, rows, width, scale, whole, top_k, top_p, min_p, seed):
    logits = rows_of(seed, rows, width, dtype, scale)
    logits = logits.round() if whole else logits
    assert_drawn(logits, uniform(seed, rows), Limits(top_k, top_p, min_p))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0], ids=["equal", "flat", "broad", "peaked"])
@pytest.mark.parametrize(
    "limits",
    [
        OFF,
        Limits(top_k=50),
        Limits(top_k=5000),
        Limits(top_p=0.9),
        Limits(min_p=0.05),
        Limits(400, 0.9, 0.01),
    ],
    ids=str,
)
def test_a_whole_vocabulary(dtype, scale, limits):
    logits = rows_of(3, 4, VOCABULARY, dtype, scale)
    assert_drawn(logits, torch.tensor([0.0, 0.37, 0.8999, 1 - 2**-24]), limits)


@pytest.mark.parametrize("width", [BLOCK - 1, BLOCK, BLOCK + 1, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 5])
def test_block_boundaries(width):
    logits = rows_of(width, 6, width, torch.bfloat16, 0.5)
    assert_drawn(logits, uniform(width, 6))
    assert_drawn(logits, uniform(width, 6), Limits(top_k=width // BLOCK + 1))
    assert_drawn(logits, uniform(width, 6), Limits(top_k=width - 1))


def test_limits_differ_from_row_to_row():
    logits, numbers = rows_of(1, 7, 3000, torch.float32, 1.0), uniform(1, 7)
    top_k = torch.tensor([0, 1, 50, 5000, -1, 2, 3000])
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.0, 1.0, 1.5, torch.nan])
    min_p = torch.tensor([0.0, 0.5, 0.1, 0.0, 2.0, torch.nan, -1.0])
    drawn = torch.ops.dlinfer_cpu.drawn_tokens.default(logits, numbers, top_k, top_p, min_p)
    alone = [draw(logits[i : i + 1], numbers[i : i + 1], limits).item() for i, limits in enumerate(
        [Limits(0, 0.9), Limits(1), Limits(50, 0.5, 0.1), Limits(0, 0.0), Limits(1), Limits(2), OFF]
    )]  # fmt: skip
    assert drawn.tolist() == alone
    strided = [torch.stack([one, one], 1)[:, 0] for one in (numbers, top_k, top_p, min_p)]
    assert torch.equal(torch.ops.dlinfer_cpu.drawn_tokens.default(logits, *strided), drawn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite(dtype):
    logits = rows_of(2, 6, 2000, dtype)
    logits[0, 700], logits[0, 900] = torch.nan, torch.inf
    logits[1, 1500] = torch.inf
    logits[2] = -torch.inf
    logits[3, ::2] = -torch.inf
    logits[4], logits[4, 1999] = -torch.inf, -3.0
    numbers = torch.full((6,), 0.7)
    for limits in (OFF, Limits(top_k=50), Limits(top_p=0.9), Limits(min_p=0.1)):
        drawn = draw(logits, numbers, limits)
        # A softmax of NaN reaches no number, and the place is then the first: of NaN, of the infinite, of equal ones.
        assert drawn[:3].tolist() == [700, 1500, 0]
        assert drawn[4] == 1999
        assert_drawn(logits[3:4], numbers[3:4], limits)
        assert_drawn(logits[5:], numbers[5:], limits)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
def test_the_largest_and_the_smallest_number(value):
    logits = torch.full((2, 1000), -value)
    logits[:, 300:700] = value
    assert_drawn(logits, torch.tensor([0.5, 0.999]))
    assert_drawn(logits, torch.tensor([0.5, 0.999]), Limits(top_k=10))


def test_zeros_of_both_signs_are_equal():
    logits = torch.zeros(2, 5000)
    logits[:, 1::2] = -0.0
    assert_drawn(logits, torch.tensor([0.3, 0.9]))
    assert_drawn(logits, torch.tensor([0.3, 0.9]), Limits(top_k=3, top_p=0.5))
    assert largest(logits).tolist() == [0, 0]


def test_numbers_that_no_bin_tells_apart():
    logits = torch.zeros(2, 5000)
    logits[:, ::3], logits[:, 1::3] = 1e-42, 2e-42
    assert_drawn(logits, torch.tensor([0.3, 0.9]))
    assert_drawn(logits, torch.tensor([0.3, 0.9]), Limits(top_k=2000))


def test_thresholds_around_zero():
    """The lowest number that matters is far smaller than the spacing of the largest."""
    logits = torch.full((1, 40 * BLOCK), -1.0)
    logits[0, ::BLOCK] = torch.tensor([1.0, *(-(10.0**-i) for i in range(1, 40))])
    for top_k in (2, 20, 30, 39, 40):
        assert_drawn(logits.expand(3, -1), torch.tensor([0.1, 0.9, 0.9999]), Limits(top_k=top_k))


def test_a_draw_of_no_number_gives_the_first_token():
    logits = rows_of(5, 3, 700, torch.float32)
    for limits in (OFF, Limits(top_k=20), Limits(top_p=0.3), Limits(min_p=0.2)):
        assert torch.equal(draw(logits, torch.zeros(3), limits), logits.argmax(-1))


def test_draws_follow_the_softmax():
    count = 20_000
    row = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = draw(row.expand(count, 3), uniform(0, count))
    # Three standard deviations of a binomial share: 3 * sqrt(0.25 / 20000) = 0.011.
    torch.testing.assert_close(torch.bincount(drawn) / count, row.exp(), atol=0.011, rtol=0)


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param(rows_of(0, 5, 1200, torch.bfloat16)[:, 7:1100], id="with gaps"),
        pytest.param(rows_of(0, 1100, 5, torch.bfloat16).t(), id="transposed"),
        pytest.param(rows_of(0, 10, 2200, torch.bfloat16)[::2, ::2], id="every other"),
        pytest.param(rows_of(0, 1, 1100, torch.bfloat16).expand(4, -1), id="rows that overlap"),
        pytest.param(rows_of(0, 0, 1100, torch.bfloat16), id="no rows"),
        pytest.param(rows_of(0, 4, 1, torch.bfloat16), id="one token"),
    ],
)
def test_layouts(logits):
    numbers = uniform(0, len(logits))
    assert torch.equal(largest(logits), logits.argmax(-1))
    for limits in (OFF, Limits(top_k=50), Limits(top_p=0.9)):
        assert torch.equal(draw(logits, numbers, limits), draw(logits.contiguous(), numbers, limits))
        assert_drawn(logits, numbers, limits)


def test_what_lies_behind_a_row_is_not_read():
    memory = torch.full((3, 1024), torch.nan)
    memory[:, :700] = rows_of(1, 3, 700, torch.float32)
    logits = memory[:, :700]
    assert torch.equal(largest(logits), logits.argmax(-1))
    assert_drawn(logits, uniform(1, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_company_do_not_change_a_token(dtype):
    logits, numbers = rows_of(4, 4, 60_000, dtype, 1.0), uniform(4, 4)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append([largest(logits), draw(logits, numbers), draw(logits, numbers, Limits(300, 0.8))])
    finally:
        torch.set_num_threads(before)
    alone = [draw(logits[i : i + 1], numbers[i : i + 1]).item() for i in range(4)]
    assert found[0][1].tolist() == alone
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_nothing_is_written():
    logits, numbers = rows_of(6, 2, 900, torch.float32), uniform(6, 2)
    before = logits.clone(), numbers.clone()
    draw(logits, numbers, Limits(40, 0.9, 0.01))
    assert torch.equal(logits, before[0])
    assert torch.equal(numbers, before[1])


def test_opcheck():
    logits, numbers = rows_of(1, 3, 40, torch.bfloat16), uniform(1, 3)
    torch.library.opcheck(torch.ops.dlinfer_cpu.largest_tokens.default, (logits,))
    limits = (torch.tensor([3, 0, 1]), torch.tensor([0.5, 1.0, 0.9]), None)
    torch.library.opcheck(torch.ops.dlinfer_cpu.drawn_tokens.default, (logits, numbers, *limits))


two = torch.zeros(2, 3)
pair = torch.zeros(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((two[0], pair), r"logits are \[rows, vocabulary\]"),
        ((two[:, :0], pair), r"logits are \[rows, vocabulary\]"),
        ((two.double(), pair), "no kernel for this dtype"),
        ((two, pair[:1]), r"numbers is \[rows = 2\]"),
        ((two, pair.double()), "numbers is float32"),
        ((two, pair, pair), "top_k is int64"),
        ((two, pair, None, pair[None]), r"top_p is \[rows = 2\]"),
        ((two, pair, None, None, pair.half()), "min_p is float32"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dlinfer_cpu.drawn_tokens.default(*arguments)
