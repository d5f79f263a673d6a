"""Prefill attention by torch: what the C++ kernel does not read is counted, and what is left to torch is not."""

import pytest
import torch
from torch import Tensor

from dlinfer import ops, settings
from dlinfer.errors import FallbackError
from dlinfer.ops.core import fallback
from dlinfer.vendor.cpu import native
from tests.vendor.cpu.prefill_case import Case, Rules, assert_close
from tests.vendor.cpu.test_native import needs_compiler

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 16


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    assert native.why_not() is None
    fallback.reset()


pytestmark = needs_compiler


def case(dtype: torch.dtype = torch.float32) -> Case:
    """Two sequences, the second with a history."""
    made = Case(0, [(20, 20), (5, 30)], KV_HEADS, HEADS // KV_HEADS, (SIZE, SIZE), BLOCK, dtype)
    made.q, made.k, made.v = made.q[:25], made.k[:50], made.v[:50]
    return made


def apart(x: Tensor) -> Tensor:
    """The same numbers with twice the distance between neighbours of the last dimension."""
    return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., ::2]


def paged(one: Case, out: Tensor | None = None, cap: float = 0.0) -> Tensor:
    lengths = (one.ends, one.kv_lens, 20, 30, HEADS, KV_HEADS)
    caches = (one.k_cache, one.v_cache, one.pages, BLOCK)
    given = {"softmax_scale": 0.2, "attn_output": out, "logit_softcapping": cap}
    return ops.paged_prefill_attention(one.q, one.k, one.v, *caches, *lengths, **given)


def packed(one: Case, out: Tensor | None = None) -> Tensor:
    q_lens = one.ends.diff(prepend=torch.tensor([0]))
    lengths = (q_lens, one.kv_lens, 20, HEADS, KV_HEADS)
    given = {"softmax_scale": 0.2, "attn_output": out}
    return ops.prefill_attention(one.q, one.k, one.v, None, None, *lengths, **given)


def counted() -> dict[str, int]:
    """Reason -> how often."""
    assert {one.vendor for one in fallback.counts()} <= {"cpu"}
    return {one.reason: count for one, count in fallback.counts().items()}


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_a_cache_whose_elements_are_apart_is_counted(which: str) -> None:
    one = case()
    setattr(one, which, apart(getattr(one, which)))
    with settings.override(fallback="allow"):
        for _ in range(2):
            assert_close(paged(one), one.reference(Rules()))
    ((reason, count),) = counted().items()
    assert (which in reason, count) == (True, 2)


def test_float64_is_counted() -> None:
    one = case(torch.float64)
    with pytest.warns(fallback.FallbackWarning, match=r"prefill_attention runs on torch's.*not float64"):
        got = packed(one)
    torch.testing.assert_close(got, one.reference(Rules()))
    assert list(counted().values()) == [1]


def test_the_policy_error_refuses_before_anything_is_written() -> None:
    one = case()
    one.v_cache, out = apart(one.v_cache), one.empty()
    with settings.override(fallback="error"):
        with pytest.raises(FallbackError, match="heads of v_cache are not contiguous"):
            paged(one, out)
        with pytest.raises(FallbackError, match="not float64"):
            packed(case(torch.float64))
    assert (out == 7.0).all()
    assert counted() == {}


def test_tokens_heads_and_results_may_lie_anywhere() -> None:
    """The kernel takes these, so that nothing is counted."""
    one = case()
    want, in_pages = packed(one), paged(one)
    assert torch.equal(in_pages, want)
    out = apart(one.empty())
    with settings.override(fallback="error"):
        assert torch.equal(paged(one, out), want)
        assert torch.equal(out, want)
        one.q, one.k, one.v = apart(one.q), apart(one.k), one.v.transpose(0, 1).contiguous().transpose(0, 1)
        one.k_cache = one.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(packed(one), want)
        assert torch.equal(paged(one), want)
    assert counted() == {}


def test_a_result_may_lie_where_other_heads_of_its_row_do() -> None:
    """Heads come one after another, so they are not written before all have been read."""
    one = case()
    want = packed(one)
    memory = torch.cat([one.q, torch.zeros(25, 1, SIZE)], 1)
    one.q, out = memory[:, :HEADS], memory[:, 1:]
    assert torch.equal(packed(one, out), want)
    assert torch.equal(out, want)
