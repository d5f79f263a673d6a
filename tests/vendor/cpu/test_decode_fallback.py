"""Decode attention that the C++ kernel does not read is computed by torch, and counted under the fallback policy."""

import pytest
import torch
from torch import Tensor

from dlinfer import ops, settings
from dlinfer.errors import FallbackError
from dlinfer.ops.core import fallback
from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import needs_compiler

BLOCK, HEADS, KV_HEADS, SIZE = 16, 4, 2, 8
TABLE = torch.tensor([[1, 2], [3, 0]])
LENGTHS = torch.tensor([20, 5])


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    assert native.why_not() is None
    fallback.reset()


pytestmark = needs_compiler


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values."""
    cache = (4, BLOCK, KV_HEADS, SIZE)
    return (
        torch.randn(2, HEADS, SIZE).to(dtype),
        torch.randn(cache).to(dtype),
        torch.randn(cache).to(dtype),
    )


def apart(x: Tensor) -> Tensor:
    """The same numbers with twice the distance between neighbours of the last dimension."""
    return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., ::2]


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
    sizes = (20, HEADS, KV_HEADS)
    return ops.paged_decode_attention(q, k, v, TABLE, BLOCK, LENGTHS, LENGTHS, *sizes, attn_output=out)


def wanted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q, dtype=torch.float64)
    q, k, v = (one.double() for one in (q, k, v))
    given = (q, k, v, TABLE, BLOCK, LENGTHS, 20, HEADS, KV_HEADS, out)
    ops.paged_decode_attention.reference(*given, SIZE**-0.5, -1, 0.0, None, None)
    return out


def counted() -> dict[str, int]:
    """Reason -> how often."""
    assert {(one.op, one.vendor) for one in fallback.counts()} <= {("paged_decode_attention", "cpu")}
    return {one.reason: count for one, count in fallback.counts().items()}


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_a_cache_whose_elements_are_apart_is_counted(which: str) -> None:
    q, k, v = inputs()
    given = (q, apart(k), v) if which == "k_cache" else (q, k, apart(v))
    with settings.override(fallback="allow"):
        for _ in range(2):
            torch.testing.assert_close(attend(*given).double(), wanted(q, k, v), rtol=1e-5, atol=1e-5)
    ((reason, count),) = counted().items()
    assert (which in reason, count) == (True, 2)


def test_float64_is_counted() -> None:
    q, k, v = inputs(torch.float64)
    with pytest.warns(fallback.FallbackWarning, match=r"paged_decode_attention runs on torch's.*not float64"):
        got = attend(q, k, v)
    torch.testing.assert_close(got, wanted(q, k, v))
    assert list(counted().values()) == [1]


def test_the_policy_error_refuses_before_anything_is_written() -> None:
    q, k, v = inputs()
    out = torch.full_like(q, 7.0)
    with settings.override(fallback="error"):
        with pytest.raises(FallbackError, match="heads of k_cache are not contiguous"):
            attend(q, apart(k), v, out)
        with pytest.raises(FallbackError, match="not float64"):
            attend(*inputs(torch.float64))
    assert (out == 7.0).all()
    assert counted() == {}


def test_pages_heads_and_results_may_lie_anywhere() -> None:
    """The kernel takes these, so that nothing is counted."""
    q, k, v = inputs()
    want = attend(q, k, v)
    out = apart(torch.full_like(q, torch.nan))
    with settings.override(fallback="error"):
        assert torch.equal(attend(q, k.transpose(1, 2).contiguous().transpose(1, 2), v), want)
        assert torch.equal(attend(apart(q), k, v), want)
        assert torch.equal(attend(q, k, v, out), want)
    assert torch.equal(out, want)
    assert counted() == {}
