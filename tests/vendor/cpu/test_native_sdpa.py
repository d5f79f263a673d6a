"""scaled_dot_product_attention in C++: what it computes and what it leaves to torch, against float64."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import needs_compiler

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of sums of at most 300 values of deviation 1, weighted by numbers that add up to 1. In 16 bits the result is rounded
# once, and so is each weight in bfloat16.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]


def attention(*args, **kwargs) -> Tensor:
    return torch.ops.dlinfer_cpu.scaled_dot_product_attention.default(*args, **kwargs)


def heads(draw: torch.Generator, batch: int, count: int, tokens: int, size: int, layout: int) -> Tensor:
    """[batch, count, tokens, size]: contiguous, with a token's heads side by side, or with gaps."""
    if layout == 0:
        return torch.randn(batch, count, tokens, size, generator=draw)
    if layout == 1:
        return torch.randn(batch, tokens, count, size, generator=draw).transpose(1, 2)
    return torch.randn(batch + 1, count, tokens + 2, size + 3, generator=draw)[1:, :, 1:-1, 2:-1]


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None = None) -> Tensor:
    """In float64, over repeated heads; zeros for queries that see nothing. seen: bool, or added to the scores."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    if seen is not None:
        hidden = scores.masked_fill(~seen, -math.inf) if seen.dtype is torch.bool else scores + seen.double()
        scores = hidden
    return scores.softmax(-1).nan_to_num(0.0) @ v


def ranges(draw: torch.Generator, batch: int, queries: int, keys: int, kind: str) -> Tensor:
    """What queries see: bool, [batch, 1, queries, keys]."""
    at = torch.arange(keys)
    shape = (batch, 1, queries, 1)
    if kind == "causal":
        end = torch.randint(0, keys + 1, (batch, 1, 1, 1), generator=draw) + torch.arange(queries)[:, None]
        return at <= end
    if kind == "window":
        end = torch.randint(0, keys + 1, (batch, 1, 1, 1), generator=draw) + torch.arange(queries)[:, None]
        return (at <= end) & (at > end - 7)
    begin = torch.randint(0, keys + 1, shape, generator=draw)
    seen = (at >= begin) & (at < begin + torch.randint(0, keys + 1, shape, generator=draw))
    return seen if kind == "ranges" else seen ^ (torch.rand(seen.shape, generator=draw) < 0.1)


def written(seen: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """A mask as models write it."""
    if form == "bool":
        return seen
    lowest = torch.finfo(dtype).min if form == "lowest" else -math.inf
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest)


@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 1, 2, 7]),
    queries=st.sampled_from([1, 1, 2, 7, 33, 70]),
    keys=st.integers(1, 300),
    size=st.sampled_from([8, 33, 64, 128]),
    size_v=st.sampled_from([0, 16, 40]),
    layouts=st.tuples(*[st.integers(0, 2)] * 3),
    kind=st.sampled_from(["none", "is_causal", "causal", "window", "ranges", "holes"]),
    form=st.sampled_from(["bool", "lowest", "infinite"]),
    own_dtype=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_it_is_attention(
    dtype, batch, kv_heads, group, queries, keys, size, size_v, layouts, kind, form, own_dtype, shared, seed
) -> None:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(kv_heads * group, queries, size), (kv_heads, keys, size), (kv_heads, keys, size_v or size)]
    q, k, v = (
        heads(draw, batch, *shape, layout).to(dtype) for shape, layout in zip(shapes, layouts, strict=True)
    )
    seen = mask = None
    if kind == "is_causal":
        seen = torch.arange(keys) <= torch.arange(queries)[:, None]
    elif kind != "none":
        seen = ranges(draw, 1 if shared else batch, queries, keys, kind)
        mask = written(seen, form, dtype if own_dtype else torch.float32)
    before = [x.clone() for x in (q, k, v)]
    out = attention(q, k, v, mask, is_causal=kind == "is_causal", enable_gqa=group > 1)
    # A row of nothing but the lowest number adds it to each score, which leaves all alike.
    added = mask if form == "lowest" and mask is not None else seen
    # Beside float16's lowest number a score in float32 is a multiple of 2**-8: weights of a row that sees nothing are
    # off by a thousandth, and what they weigh differs by up to 8.
    atol = 2**-7 if form == "lowest" and dtype is torch.float16 and own_dtype else TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), exact(q, k, v, added), rtol=2e-3, atol=atol)
    assert out.shape == (batch, kv_heads * group, queries, size_v or size) and out.dtype is dtype
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 40])
def test_what_nobody_sees_is_not_read(dtype, queries) -> None:
    """A static cache's places that are not filled yet, whose memory may hold anything."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (heads(draw, 2, n, tokens, 16, 1).to(dtype) for n, tokens in ((4, queries), (2, 96), (2, 96)))
    seen = torch.arange(96) <= torch.arange(50 - queries, 50)[:, None]
    k[:, :, 50:], v[:, :, 50:] = math.nan, math.inf
    out = attention(q, k, v, written(seen[None, None], "infinite", dtype), enable_gqa=True)
    wanted = exact(q, k[:, :, :50], v[:, :, :50], seen[:, :50])
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_group_are_its_heads(dtype) -> None:
    """As graphs write one token's queries: the heads of a group as rows, with the bits of the heads themselves."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (heads(draw, 2, n, tokens, 64, 1).to(dtype) for n, tokens in ((14, 1), (2, 300), (2, 300)))
    mask = (torch.arange(300) < 250).expand(1, 1, 1, 300)
    as_heads = attention(q, k, v, mask, enable_gqa=True)
    as_rows = attention(q.reshape(2, 2, 7, 64), k, v, mask)
    assert torch.equal(as_rows.reshape(2, 14, 1, 64), as_heads)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("queries", [1, 100])
def test_bits_do_not_depend_on_threads_or_batch(threads, queries) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        heads(draw, 3, n, tokens, 64, 1).bfloat16() for n, tokens in ((4, queries), (2, 700), (2, 700))
    )
    seen = ranges(draw, 3, queries, 700, "causal")
    alone = [attention(*(x[i : i + 1] for x in (q, k, v, seen)), enable_gqa=True) for i in range(3)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(attention(q, k, v, seen, enable_gqa=True), torch.cat(alone))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[0.0, -1.0, -math.inf]]),
        torch.tensor([[0.0, math.nan, 0.0]]),
        torch.tensor([[True, False, True]]),
        torch.full((1, 3), torch.finfo(torch.float32).min),
        torch.full((1, 3), -1e20),
        torch.zeros(1, 4, 2, 3).index_fill(1, torch.tensor(2), -math.inf),
        torch.zeros(3, 2).t(),
        torch.zeros(1, 1, 1, 1),
    ],
    ids=str,
)
def test_other_masks_are_torch_s(mask) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (heads(draw, 1, 4, tokens, 8, 0) for tokens in (2, 3, 3))
    torch.testing.assert_close(
        attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask), equal_nan=True
    )


@pytest.mark.parametrize("scale", [None, 0.5, 0.0, -0.3, 1e-3])
def test_scales(scale) -> None:
    draw = torch.Generator().manual_seed(0)
    for queries in (1, 50):
        q, k, v = (heads(draw, 1, 4, tokens, 8, 0) for tokens in (queries, 60, 60))
        wanted = exact(q, k, v, None, scale)
        torch.testing.assert_close(attention(q, k, v, scale=scale).double(), wanted, rtol=0, atol=3e-6)


_BOTH = (attention, F.scaled_dot_product_attention)


@pytest.mark.parametrize("shape", [(0, 4, 3, 8), (2, 4, 0, 8), (2, 0, 3, 8)])
def test_nothing_to_do(shape) -> None:
    q = torch.zeros(shape)
    assert attention(q, q, q).shape == q.shape


def causal_with_a_mask(op: Callable[..., Tensor], x: Tensor) -> Tensor | str:
    """The result, or the error's text: torch 2.15 refuses such a call."""
    try:
        return op(x, x, x, torch.zeros(x.shape[-2], x.shape[-2]), is_causal=True)
    except RuntimeError as error:
        return str(error)


def test_other_calls_are_torch_s() -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(4, 5, 8, generator=draw)  # without a batch
    torch.testing.assert_close(attention(q, q, q), F.scaled_dot_product_attention(q, q, q))
    wide = torch.randn(1, 2, 5, 8, generator=draw).double()
    torch.testing.assert_close(attention(wide, wide, wide), F.scaled_dot_product_attention(wide, wide, wide))
    ours, theirs = (causal_with_a_mask(op, wide.float()) for op in _BOTH)
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(RuntimeError):
        attention(torch.zeros(1, 3, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
