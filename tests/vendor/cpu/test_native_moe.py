"""Experts in C++ against the ops' references in float64, over drawn shapes; what their bits depend on, and what not."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops
from dlinfer import settings as dlinfer_settings
from dlinfer.errors import OpArgumentError
from dlinfer.ops.core import fallback
from dlinfer.vendor.cpu import moe, native
from tests.vendor.cpu.test_native import needs_compiler, tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MANY = 300
"""Rows of an expert that are taken as two linear layers, in float32 and bfloat16."""


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


class Case:
    """Experts of which only those that ids name have numbers; the others are NaN."""

    def __init__(self, seed: int, ids: Tensor, experts: int, hidden: int, intermediate: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = ids
        self.x = torch.randn(ids.shape[0], hidden, generator=draw)
        weights = torch.rand(ids.shape, generator=draw) + 0.1
        self.weights = (
            0.7 * weights / weights.sum(-1, keepdim=True)
        )  # as a softmax of more experts gives them
        self.gate_up = torch.randn(experts, 2 * intermediate, hidden, generator=draw) * hidden**-0.5
        self.down = torch.randn(experts, hidden, intermediate, generator=draw) * intermediate**-0.5
        self.gate_up_bias = torch.randn(experts, 2 * intermediate, generator=draw)
        self.down_bias = torch.randn(experts, hidden, generator=draw)
        unchosen = torch.ones(experts, dtype=torch.bool).index_fill_(0, ids.flatten().long(), False)
        for stack in (self.gate_up, self.down, self.gate_up_bias, self.down_bias):
            stack[unchosen] = torch.nan

    def native(self, dtype: torch.dtype, renormalize: bool = False) -> Tensor:
        given = (one.to(dtype) for one in (self.x, self.gate_up, self.down))
        return torch.ops.dlinfer_cpu.fused_moe.default(*given, self.weights, self.ids, renormalize)

    def native_clamped(self, dtype: torch.dtype) -> Tensor:
        given = (
            one.to(dtype) for one in (self.x, self.gate_up, self.gate_up_bias, self.down, self.down_bias)
        )
        clamped = torch.ops.dlinfer_cpu.fused_moe_clamped.default
        return clamped(*given, self.weights, self.ids, 1.702, 1.5)

    def reference(self, dtype: torch.dtype, renormalize: bool = False) -> Tensor:
        given = (one.to(dtype).double() for one in (self.x, self.gate_up, self.down))
        weights = self.weights.double()
        return ops.fused_moe.reference(*given, weights, self.ids, self.ids.shape[1], renormalize)

    def reference_clamped(self, dtype: torch.dtype) -> Tensor:
        given = (self.x, self.gate_up, self.gate_up_bias, self.down, self.down_bias)
        wide = (one.to(dtype).double() for one in given)
        return ops.fused_moe_clamped.reference(*wide, self.weights.double(), self.ids, 1.702, 1.5)


def chosen(seed: int, tokens: int, experts: int, topk: int) -> Tensor:
    """Experts of each token, among which one may be twice."""
    return torch.randint(0, experts, (tokens, topk), generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, want: Tensor, tolerances=ops.fused_moe.tolerances) -> None:
    tolerance = tolerances[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance.rtol, atol=tolerance.atol)


@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    topk=st.integers(0, 9),
    hidden=st.integers(1, 300),
    intermediate=st.integers(1, 200),
    renormalize=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 1, 8, 8, 1024, 512, True, 0)
@example(torch.float16, 1, 2, 1, 48, 16, False, 0)
@example(torch.float32, 130, 2, 2, 64, 48, True, 0)
@example(torch.bfloat16, MANY, 3, 2, 64, 48, False, 0)
@settings(max_examples=150, deadline=None)
def test_it_is_the_reference(dtype, tokens, experts, topk, hidden, intermediate, renormalize, seed) -> None:
    case = Case(seed, chosen(seed, tokens, experts, topk), experts, hidden, intermediate)
    assert_close(case.native(dtype, renormalize), case.reference(dtype, renormalize))
    assert_close(case.native_clamped(dtype), case.reference_clamped(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_every_boundary(dtype: torch.dtype) -> None:
    """Rows of an expert around tiles, what is computed at a time, and the limits above which linear layers take it."""
    for rows in (1, 2, 3, 7, 8, 9, 16, 17, 63, 64, 65, 128, 129, 256, 257):
        for hidden, intermediate in ((15, 1), (16, 15), (33, 17), (64, 31), (130, 33)):
            ids = torch.full((rows, 1), 2)
            case = Case(rows, ids, 4, hidden, intermediate)
            assert_close(case.native(dtype), case.reference(dtype))
            assert_close(case.native_clamped(dtype), case.reference_clamped(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_beyond_a_chunk_and_rows_too_wide_for_a_block_of_sixteen(dtype: torch.dtype) -> None:
    case = Case(0, chosen(0, 3, 3, 2), 3, 4100, 24)
    assert_close(case.native(dtype), case.reference(dtype))
    case = Case(1, chosen(1, 3, 3, 2), 3, 24, 13000)
    assert_close(case.native(dtype), case.reference(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_few_and_of_many_rows_in_one_call(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 5]]).repeat(MANY, 1)
    ids[:3, 0], ids[10:30, 1] = 4, 2
    case = Case(2, ids, 7, 96, 80)
    assert_close(case.native(dtype), case.reference(dtype))
    assert_close(case.native_clamped(dtype), case.reference_clamped(dtype))


def test_more_tokens_than_are_computed_at_a_time() -> None:
    case = Case(3, chosen(3, 4100, 40, 2), 40, 16, 16)
    assert_close(case.native(torch.float32), case.reference(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_company_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    case = Case(4, chosen(4, 12, 6, 3), 6, 520, 136)  # few rows each: torch's product has other bits
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((case.native(dtype), case.native_clamped(dtype)))
    finally:
        torch.set_num_threads(before)
    for one in results:
        assert torch.equal(one[0], results[0][0])
        assert torch.equal(one[1], results[0][1])
    whole = results[0][0]
    x, ids, weights = case.x, case.ids, case.weights
    for row in (0, 7, 11):
        some = slice(row, row + 1)
        case.x, case.ids, case.weights = x[some], ids[some], weights[some]
        assert torch.equal(case.native(dtype)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, MANY])
def test_strides(dtype: torch.dtype, tokens: int) -> None:
    """Whatever lies between rows is NaN, and comes into no result."""
    case = Case(5, chosen(5, tokens, 4, 2), 4, 48, 40)

    def apart(t: Tensor) -> Tensor:
        wide = torch.full([size + 3 for size in t.shape], torch.nan, dtype=dtype)
        return wide[tuple(slice(1, size + 1) for size in t.shape)].copy_(t)

    want, clamped = case.reference(dtype), case.reference_clamped(dtype)
    stacks = (case.x, case.gate_up, case.down, case.gate_up_bias, case.down_bias)
    x, gate_up, down, gate_up_bias, down_bias = map(apart, stacks)
    choice = case.weights.t().contiguous().t(), case.ids.int().t().contiguous().t()
    plain = torch.ops.dlinfer_cpu.fused_moe.default
    assert_close(plain(x, gate_up, down, *choice, False), want)
    gptoss = torch.ops.dlinfer_cpu.fused_moe_clamped.default
    assert_close(gptoss(x, gate_up, gate_up_bias, down, down_bias, *choice, 1.702, 1.5), clamped)
    columns = x.t().contiguous().t()  # the elements of a token lie apart
    assert_close(plain(columns, gate_up, down, *choice, False), want)
    for one, other in ((turned(gate_up), down), (gate_up, turned(down)), (turned(gate_up), turned(down))):
        assert_close(plain(x, one, other, *choice, False), want)
    turned_bias = gate_up_bias.t().contiguous().t()
    assert_close(gptoss(x, gate_up, turned_bias, down, down_bias, *choice, 1.702, 1.5), clamped)


def turned(stack: Tensor) -> Tensor:
    """Stored as [experts, in, out]."""
    return stack.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("of_weights", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_dtypes_of_the_weights_of_a_choice(of_weights: torch.dtype, renormalize: bool) -> None:
    case = Case(6, chosen(6, 9, 4, 3), 4, 32, 24)
    case.weights = case.weights.to(of_weights)
    assert_close(case.native(torch.float32, renormalize), case.reference(torch.float32, renormalize))
    assert_close(case.native(torch.bfloat16, renormalize), case.reference(torch.bfloat16, renormalize))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_with_their_tokens(dtype: torch.dtype) -> None:
    case = Case(7, torch.tensor([[0, 1], [1, 2], [3, 1], [2, 2]]), 4, 40, 24)
    want = case.native(dtype)
    case.x[2, 5] = torch.nan
    case.down[0, 3, 0] = torch.inf
    got = case.native(dtype)
    assert got[2].isnan().all()
    assert not got[0, 3].isfinite()
    for row, columns in ((0, [0, 1, 2, *range(4, 40)]), (1, slice(None)), (3, slice(None))):
        assert torch.equal(got[row, columns], want[row, columns])


def test_large_gates_do_not_overflow() -> None:
    case = Case(8, chosen(8, 4, 2, 2), 2, 16, 16)
    case.gate_up[:, :16] *= 1000
    got, want = case.native(torch.float32), case.reference(torch.float32)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-3)
    got, want = case.native_clamped(torch.float32), case.reference_clamped(torch.float32)
    assert_close(got, want)


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
@pytest.mark.parametrize("tokens", [1, MANY])
def test_ids_that_name_no_expert_are_refused(bad: int, tokens: int) -> None:
    case = Case(9, chosen(9, tokens, 4, 2), 4, 16, 16)
    case.ids[tokens - 1, 1] = bad
    with pytest.raises(RuntimeError, match=rf"fused_moe: argument topk_ids: .*\b{abs(bad)}\b"):
        case.native(torch.bfloat16)
    stacks = (case.gate_up, case.down)
    with pytest.raises(OpArgumentError, match=r"ids of 0\.\.3"):
        ops.fused_moe(case.x, *stacks, case.weights, case.ids, 2, True)
    stacks = (case.gate_up, case.gate_up_bias, case.down, case.down_bias)
    with pytest.raises(OpArgumentError, match=r"ids of 0\.\.3"):
        ops.fused_moe_clamped(case.x, *stacks, case.weights, case.ids, 1.7, 7.0)


def test_sizes_that_do_not_fit_are_refused() -> None:
    case = Case(10, chosen(10, 3, 4, 2), 4, 16, 24)
    plain = torch.ops.dlinfer_cpu.fused_moe.default
    for call in (
        (case.x, case.gate_up, case.down[:, :, :8], case.weights, case.ids),
        (case.x, case.gate_up, case.down[:3], case.weights, case.ids),
        (case.x, case.gate_up, case.down.bfloat16(), case.weights, case.ids),
        (case.x, case.gate_up, case.down, case.weights[:2], case.ids),
        (case.x, case.gate_up, case.down, case.weights, case.ids[:, :1]),
        (case.x[:2], case.gate_up, case.down, case.weights, case.ids),
    ):
        with pytest.raises(RuntimeError, match="fused_moe: "):
            plain(*call, False)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_the_library_torch_computes_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "compiled", lambda *given: None)
    for sizes in ((32, 16), (19, 13)):
        case = Case(11, chosen(11, 9, 5, 2), 5, *sizes)
        x, gate_up, down, gate_up_bias, down_bias = (
            one.to(dtype) for one in (case.x, case.gate_up, case.down, case.gate_up_bias, case.down_bias)
        )
        tolerances = ops.fused_moe.tolerances | {torch.float64: ops.Tolerance(1e-12, 1e-12, "two sums")}
        plain = moe.fused_moe(x, gate_up, down, case.weights, case.ids, 2, True)
        assert_close(plain, case.reference(dtype, True), tolerances)
        stacks = (gate_up, gate_up_bias, down, down_bias)
        clamped = moe.fused_moe_clamped(x, *stacks, case.weights, case.ids, 1.702, 1.5)
        assert_close(clamped, case.reference_clamped(dtype), tolerances)


def test_calls_without_the_library_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlinfer.vendor.cpu import compiled

    monkeypatch.setattr(compiled, "_reasons", {})
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    fallback.reset()
    case = Case(12, chosen(12, 2, 3, 2), 3, 16, 16)
    with dlinfer_settings.override(fallback="allow"):
        moe.fused_moe(case.x, case.gate_up, case.down, case.weights, case.ids, 2, True)
    assert {one.op for one in fallback.counts()} == {"fused_moe"}
    fallback.reset()


def test_two_callers_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    cases = [Case(seed, chosen(seed, 5, 6, 3), 6, 256, 128) for seed in range(2)]
    wanted = [case.native(torch.bfloat16) for case in cases]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(30):
            for got, want in zip(
                pool.map(lambda case: case.native(torch.bfloat16), cases), wanted, strict=True
            ):
                assert torch.equal(got, want)


def test_opcheck() -> None:
    x, gate_up, down = (
        tensor(i, shape, torch.bfloat16) for i, shape in enumerate([(3, 16), (4, 24, 16), (4, 16, 12)])
    )
    weights, ids = torch.rand(3, 2), chosen(0, 3, 4, 2)
    torch.library.opcheck(torch.ops.dlinfer_cpu.fused_moe.default, (x, gate_up, down, weights, ids, True))
    stacks = (gate_up, gate_up[:, :, 0].contiguous(), down, down[:, :, 0].contiguous())
    clamped = torch.ops.dlinfer_cpu.fused_moe_clamped.default
    torch.library.opcheck(clamped, (x, *stacks, weights, ids, 1.7, 7.0))
