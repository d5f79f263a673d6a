"""The router in C++ against the op's reference in float64, over drawn shapes; whom it takes of equals; what is NaN."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops
from dlinfer import settings as dlinfer_settings
from dlinfer.errors import OpArgumentError
from dlinfer.ops.core import fallback
from dlinfer.vendor.cpu import compiled, moe, native
from tests.vendor.cpu.test_native import needs_compiler

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


def gating(logits: Tensor, topk: int, n_groups: int = -1) -> tuple[Tensor, Tensor]:
    return torch.ops.dlinfer_cpu.moe_gating_topk_softmax.default(logits, topk, n_groups)


def assert_right(logits: Tensor, topk: int, n_groups: int = -1) -> None:
    """Which of equal logits are chosen is the kernel's business, so the probabilities are compared."""
    weights, ids = gating(logits, topk, n_groups)
    assert weights.dtype is torch.float32 and ids.dtype is torch.int64
    assert weights.shape == ids.shape == (*logits.shape[:-1], topk)
    want, _ = ops.moe_gating_topk_softmax.reference(logits.double(), topk, n_groups)
    tolerance = ops.moe_gating_topk_softmax.tolerances[logits.dtype]
    rtol, atol = tolerance.rtol, tolerance.atol
    torch.testing.assert_close(weights.double(), want, rtol=rtol, atol=atol)
    chosen = logits.double().softmax(-1).gather(-1, ids)
    torch.testing.assert_close(weights.double(), chosen, rtol=rtol, atol=atol)
    groups = max(n_groups, 1)
    shares = weights.unflatten(-1, (groups, topk // groups))
    assert (shares.diff(dim=-1) <= 0).all()
    for row in ids.flatten(0, -2).tolist() if ids.dim() > 1 else [ids.tolist()]:
        assert len(set(row)) == topk


@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 40),
    groups=st.integers(1, 5),
    size=st.integers(1, 70),
    share=st.integers(1, 9),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 2**31),
)
@example(torch.bfloat16, 1, 1, 128, 8, 1.0, 0)
@example(torch.float32, 300, 1, 128, 8, 1.0, 1)
@example(torch.float16, 3, 4, 17, 1, 1.0, 2)
@settings(max_examples=150, deadline=None)
def test_it_is_the_reference(dtype, tokens, groups, size, share, spread, seed) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, groups * size, generator=draw) * spread).clamp(-6e4, 6e4).to(dtype)
    assert_right(logits, groups * min(share, size), groups if groups > 1 else -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape_and_strides(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 10, 40, generator=draw).to(dtype)
    assert_right(logits[0, 0], 3)
    assert_right(logits, 3)
    assert_right(logits.permute(2, 0, 1)[..., ::3], 3)
    assert_right(logits[:, ::2, 5:20], 15)
    assert_right(logits[:1].expand(4, 10, 40), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_probabilities_the_first_experts_are_taken(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0, 2.0, 0.0], [-torch.inf] * 5 + [1.0]]).to(dtype)
    assert gating(logits, 5)[1].tolist() == [[1, 2, 4, 0, 5], [5, 0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_probabilities_is_nan_and_names_experts(dtype: torch.dtype) -> None:
    """As in torch; the ids are read as indices whatever the weights are."""
    logits = torch.randn(4, 20).to(dtype)
    logits[0, 7], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    weights, ids = gating(logits, 4)
    assert weights[:3].isnan().all() and weights[3].isfinite().all()
    for row in ids.tolist():
        assert len({one for one in row if 0 <= one < 20}) == 4
    assert logits.float().softmax(-1)[:3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_alone_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    logits = torch.randn(500, 60, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(gating(logits, 6))
    finally:
        torch.set_num_threads(before)
    for weights, ids in results:
        assert torch.equal(weights, results[0][0]) and torch.equal(ids, results[0][1])
    for row in (0, 17, 499):
        alone = gating(logits[row], 6)
        assert torch.equal(alone[0], results[0][0][row]) and torch.equal(alone[1], results[0][1][row])


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.randn(2, 12)
    for topk, groups in ((0, -1), (13, -1), (4, 3), (5, 5)):
        with pytest.raises(RuntimeError, match="moe_gating_topk_softmax: topk"):
            gating(logits, topk, groups)
        with pytest.raises(OpArgumentError):
            ops.moe_gating_topk_softmax.overload(logits, topk, groups)
    with pytest.raises(RuntimeError, match="at least one dimension"):
        gating(torch.tensor(1.0), 1)
    with pytest.raises(RuntimeError, match="no kernel for this dtype"):
        gating(logits.double(), 1)


def test_without_the_library_it_is_the_reference_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_reasons", {})
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    fallback.reset()
    logits = torch.randn(5, 12)
    want = ops.moe_gating_topk_softmax.reference(logits, 4, 2)
    with dlinfer_settings.override(fallback="allow"):
        got = moe.moe_gating_topk_softmax(logits, 4, 2)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert {one.op for one in fallback.counts()} == {"moe_gating_topk_softmax"}
    fallback.reset()
    moe.moe_gating_topk_softmax(logits.double(), 4, -1)  # an oracle's, which is torch's to compute
    assert not fallback.counts()


def test_opcheck() -> None:
    logits = torch.randn(3, 5, 16).bfloat16()
    torch.library.opcheck(torch.ops.dlinfer_cpu.moe_gating_topk_softmax.default, (logits, 4, 2))
