"""DLINFER_CPU_BATCH_INVARIANT: a row's bits are the same alone, in any batch and in any chunk of its prompt."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.bf12.matrices import pack
from tests.vendor.cpu.test_native import DTYPES, assert_close, linear, linears, needs_compiler, tensor

pytestmark = [needs_compiler, pytest.mark.usefixtures("invariant")]
ROWS = 300
"""More than each limit between two kernels, and than a panel of 256 rows."""


@pytest.fixture(scope="module")
def invariant() -> Iterator[None]:
    assert native.why_not() is None
    switch = torch.ops.dlinfer_cpu.set_batch_invariant.default
    switch(True)
    yield
    switch(False)


def is_served(dtype: torch.dtype) -> bool:
    """Whether these instructions have a product of the dtype; SSE has none of float16."""
    return torch.ops.dlinfer_cpu.linear_max_inputs.default(dtype) >= 0


def own(dtype: torch.dtype) -> torch.dtype:
    if not is_served(dtype):
        pytest.skip(f"no product of {dtype} at this level of instructions")
    return dtype


spans = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(
    lambda pair: (pair[0], min(pair[0] + pair[1], ROWS))
)
FEW_EXAMPLES = settings(max_examples=40, deadline=None)


def assert_same_alone(call: Callable[[Tensor], Tensor], x: Tensor, parts: list[tuple[int, int]]) -> None:
    """A call on some rows of x gives the bits that it gives for them among all rows."""
    together = call(x)
    for first, last in [*parts, (0, 1), (17, 18)]:
        assert torch.equal(call(x[first:last]), together[first:last]), (first, last)


@given(
    dtype=st.sampled_from(DTYPES),
    parts=st.lists(spans, min_size=1, max_size=4),
    out_features=st.integers(1, 40).map(lambda half: 2 * half),
    in_features=st.integers(1, 1300),
    seed=st.integers(0, 2**31),
)
@FEW_EXAMPLES
def test_linear(dtype, parts, out_features, in_features, seed):
    assume(is_served(dtype))
    x, bias = tensor(seed, (ROWS, in_features), dtype), tensor(seed + 2, (out_features,), dtype)
    weight = tensor(seed + 1, (out_features, in_features), dtype)
    gated = torch.ops.dlinfer_cpu.linear_silu_and_mul.default
    assert_same_alone(lambda rows: linear(rows, weight, bias), x, parts)
    assert_same_alone(lambda rows: torch.cat(linears(rows, [weight, weight], [bias, None]), -1), x, parts)
    assert_same_alone(lambda rows: gated(rows, weight, bias), x, parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_against_float64(dtype):
    x, weight = tensor(0, (ROWS, 700), own(dtype)), tensor(1, (50, 700), dtype)
    for rows in (1, 3, 100, ROWS):
        assert_close(linear(x[:rows], weight), x[:rows], weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_with_gaps(dtype):
    """torch's product reads it where it lies, but has another order for another number of rows."""
    x, weight = tensor(0, (ROWS, 70), own(dtype)), tensor(1, (70, 50), dtype).t()
    assert_same_alone(lambda rows: linear(rows, weight), x, [(3, 40)])
    assert torch.equal(linear(x, weight), linear(x, weight.contiguous()))


@given(
    parts=st.lists(spans, min_size=1, max_size=4), in_features=st.integers(1, 700), seed=st.integers(0, 2**31)
)
@FEW_EXAMPLES
def test_weights_of_12_bits(parts, in_features, seed):
    x = tensor(seed, (ROWS, in_features), torch.bfloat16)
    plain = tensor(seed + 1, (24, in_features), torch.bfloat16)
    packed, gated = pack(plain), torch.ops.dlinfer_cpu.linear_bf12_silu_and_mul.default
    product = torch.ops.dlinfer_cpu.linear_bf12.default
    assert_same_alone(lambda rows: product(rows, packed, None, 24), x, parts)
    assert_same_alone(lambda rows: gated(rows, packed, None, 24), x, parts)
    assert torch.equal(product(x, packed, None, 24), linear(x, plain))


@given(
    dtype=st.sampled_from(DTYPES),
    parts=st.lists(spans, min_size=1, max_size=4),
    group=st.sampled_from((32, 64, 128, -1)),
    has_zeros=st.booleans(),
    seed=st.integers(0, 2**31),
)
@FEW_EXAMPLES
def test_weights_of_4_bits(dtype, parts, group, has_zeros, seed):
    draw = torch.Generator().manual_seed(seed)
    columns, features = 384, 72
    groups = 1 if group < 0 else columns // group

    def words(rows: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (rows, features // 8), generator=draw).int()

    weight, zeros = words(columns), words(groups) if has_zeros else None
    scales = torch.rand(groups, features, generator=draw).half()
    x = tensor(seed, (ROWS, columns), dtype)
    product = torch.ops.dlinfer_cpu.weight_quant_matmul.default
    assert_same_alone(lambda rows: product(rows, weight, scales, zeros, None, group), x, parts)


@given(
    dtype=st.sampled_from(DTYPES), parts=st.lists(spans, min_size=1, max_size=4), seed=st.integers(0, 2**31)
)
@FEW_EXAMPLES
def test_weights_of_8_bits(dtype, parts, seed):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (70, 300), generator=draw, dtype=torch.int8)
    scales, norm = torch.rand(70, generator=draw), tensor(seed + 1, (300,), dtype)
    kernels = torch.ops.dlinfer_cpu

    def layer(rows: Tensor) -> Tensor:
        numbers, by = kernels.rms_norm_w8a8(rows, norm, 1e-6, torch.int8)
        return kernels.linear_w8a8(numbers, weight, by, scales, dtype, torch.int8, None)

    def layer_of_rows(rows: Tensor) -> Tensor:
        numbers, by = kernels.dynamic_quant(rows, torch.int8)
        return kernels.linear_w8a8(numbers, weight, by, scales, dtype, torch.int8, None)

    x = tensor(seed, (ROWS, 300), dtype)
    assert_same_alone(layer, x, parts)
    assert_same_alone(layer_of_rows, x, parts)


@given(
    dtype=st.sampled_from(DTYPES),
    parts=st.lists(spans, min_size=1, max_size=4),
    topk=st.integers(1, 3),
    experts=st.sampled_from((3, 8)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=20, deadline=None)
def test_experts(dtype, parts, topk, experts, seed):
    """Few experts get many rows of a batch, and few of a part."""
    assume(is_served(dtype))
    hidden, size = 72, 40
    gate_up = tensor(seed + 1, (experts, 2 * size, hidden), dtype)
    down, router = (
        tensor(seed + 2, (experts, hidden, size), dtype),
        tensor(seed + 3, (experts, hidden), dtype),
    )

    def layer(rows: Tensor) -> Tensor:
        chosen = torch.ops.dlinfer_cpu.moe_gating_topk_softmax(linear(rows, router), topk, 1)
        return torch.ops.dlinfer_cpu.fused_moe(rows, gate_up, down, *chosen, True)

    assert_same_alone(layer, tensor(seed, (ROWS, hidden), dtype), parts)


@given(
    dtype=st.sampled_from(DTYPES),
    parts=st.lists(spans, min_size=1, max_size=4),
    size=st.integers(1, 150),
    seed=st.integers(0, 2**31),
)
@FEW_EXAMPLES
def test_norms_and_activations(dtype, parts, size, seed):
    x, weight = tensor(seed, (ROWS, 2 * size), dtype), tensor(seed + 1, (2 * size,), dtype)
    kernels = torch.ops.dlinfer_cpu
    assert_same_alone(lambda rows: kernels.rms_norm(rows, weight, 1e-6), x, parts)
    assert_same_alone(lambda rows: kernels.add_rms_norm(rows, rows * 0.5, weight, 1e-6)[0], x, parts)
    assert_same_alone(kernels.silu_and_mul.default, x, parts)


class Sequence:
    """A sequence of random queries, keys and values, and its blocks in a cache that several share.

    blocks: the numbers of its blocks.
    """

    def __init__(
        self, draw: torch.Generator, length: int, heads: tuple[int, int], size: int, dtype: torch.dtype
    ):
        self.length = length
        self.q, self.k, self.v = (
            torch.randn(length, count, size, generator=draw).to(dtype)
            for count in (heads[0], heads[1], heads[1])
        )
        self.blocks: list[int] = []


BLOCK = 16


class Cache:
    """Sequences in pages, in a random order of blocks."""

    def __init__(self, draw: torch.Generator, sequences: list[Sequence]) -> None:
        counts = [-(-one.length // BLOCK) for one in sequences]
        order = iter(torch.randperm(sum(counts) + 1, generator=draw).tolist())
        shape = (sum(counts) + 1, BLOCK, *sequences[0].k.shape[1:])
        self.k, self.v = (torch.full(shape, torch.nan, dtype=sequences[0].k.dtype) for _ in range(2))
        for one, count in zip(sequences, counts, strict=True):
            one.blocks = [next(order) for _ in range(count)]
            for position in range(one.length):
                place = one.blocks[position // BLOCK], position % BLOCK
                self.k[place], self.v[place] = one.k[position], one.v[position]


def attend(
    cache: Cache, parts: list[tuple[Sequence, int, int]], options: tuple, *, decodes: bool
) -> list[Tensor]:
    """The attention of the queries [first, last) of each sequence, in one call."""
    scale, window, softcap, slopes, sinks = options
    columns = max(len(one.blocks) for one, _, _ in parts)
    table = torch.tensor([one.blocks + [0] * (columns - len(one.blocks)) for one, _, _ in parts])
    lengths = torch.tensor([last for _, _, last in parts])
    q = torch.cat([one.q[first:last] for one, first, last in parts])
    out = torch.empty_like(q)
    sizes = [last - first for _, first, last in parts]
    kernels, caches = torch.ops.dlinfer_cpu, (cache.k, cache.v, table)
    if decodes:
        kernels.paged_decode_attention(q, *caches, lengths, out, scale, window, softcap, slopes, sinks)
    else:
        ends = torch.tensor(sizes).cumsum(0)
        shape = (scale, True, window, 0, softcap, slopes, sinks)
        kernels.paged_prefill_attention(q, *caches, ends, lengths, out, *shape)
    return list(out.split(sizes))


@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(1, 330), min_size=1, max_size=3),
    length=st.integers(2, 400),
    heads=st.sampled_from(((1, 1), (4, 4), (7, 1), (14, 2))),
    size=st.sampled_from((16, 24, 64)),
    window=st.sampled_from((-1, 5, 100)),
    softcap=st.sampled_from((0.0, 20.0)),
    has_slopes=st.booleans(),
    has_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
@FEW_EXAMPLES
def test_attention(dtype, lengths, length, heads, size, window, softcap, has_slopes, has_sinks, seed, data):
    """A prompt whole and alone, in chunks beside other sequences, and token by token beside others."""
    draw = torch.Generator().manual_seed(seed)
    one, *others = (Sequence(draw, count, heads, size, dtype) for count in (length, *lengths))
    cache = Cache(draw, [one, *others])
    slopes, sinks = (torch.rand(heads[0], generator=draw) if has else None for has in (has_slopes, has_sinks))
    options = (size**-0.5, window, softcap, slopes, sinks)
    (whole,) = attend(cache, [(one, 0, length)], options, decodes=False)
    packed = torch.empty_like(one.q)
    torch.ops.dlinfer_cpu.prefill_attention(
        *(one.q, one.k, one.v, torch.tensor([length]), torch.tensor([length]), packed),
        *(options[0], True, window, 0, *options[2:]),
    )
    assert torch.equal(packed, whole)
    assert whole.isfinite().all()

    begin = 0
    while begin < length:
        end = data.draw(st.integers(begin + 1, length), "end of a chunk")
        beside = [(each, data.draw(st.integers(0, each.length - 1)), each.length) for each in others]
        place = data.draw(st.integers(0, len(beside)), "place in the batch")
        found = attend(cache, [*beside[:place], (one, begin, end), *beside[place:]], options, decodes=False)[
            place
        ]
        assert torch.equal(found, whole[begin:end]), (begin, end)
        begin = end

    for position in data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4), "decoded"):
        beside = [(each, each.length - 1, each.length) for each in others]
        found = attend(cache, [*beside, (one, position, position + 1)], options, decodes=True)[-1]
        assert torch.equal(found[0], whole[position]), position


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_is_close_to_the_usual_kernel(dtype):
    draw = torch.Generator().manual_seed(0)
    sequences = [Sequence(draw, length, (14, 2), 64, dtype) for length in (1, 40, 333, 700)]
    cache, options = Cache(draw, sequences), (0.125, -1, 0.0, None, None)
    parts = [(each, each.length - 1, each.length) for each in sequences]
    found = torch.cat(attend(cache, parts, options, decodes=True))
    switch = torch.ops.dlinfer_cpu.set_batch_invariant.default
    switch(False)
    try:
        usual = torch.cat(attend(cache, parts, options, decodes=True))
    finally:
        switch(True)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found, usual, rtol=tolerance, atol=tolerance)


@given(
    rows=st.integers(1, 40),
    part=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    top_k=st.sampled_from((0, 20)),
)
@FEW_EXAMPLES
def test_drawn_tokens(rows, part, seed, top_k):
    draw = torch.Generator().manual_seed(seed)
    logits, numbers = torch.randn(rows, 5000, generator=draw), torch.rand(rows, generator=draw)
    limits = torch.full((rows,), top_k), torch.full((rows,), 0.9)
    kernels = torch.ops.dlinfer_cpu
    together = kernels.drawn_tokens(logits, numbers, *limits)
    some = slice(max(rows - part, 0), rows)
    alone = kernels.drawn_tokens(logits[some], numbers[some], *(limit[some] for limit in limits))
    assert torch.equal(alone, together[some])
    assert torch.equal(kernels.largest_tokens(logits[some]), logits[some].argmax(-1))


def test_only_on_request():
    """The usual kernels take over again when the mode is off."""
    most = torch.ops.dlinfer_cpu.linear_max_inputs.default
    switch = torch.ops.dlinfer_cpu.set_batch_invariant.default
    on = most(torch.float32)
    switch(False)
    try:
        assert most(torch.float32) < on
    finally:
        switch(True)
