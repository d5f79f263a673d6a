"""The C++ linear layer with a weight of 4 bits, against float64; other instruction sets as in test_native.py."""

import ctypes
import mmap
import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.cpu.four_bit import linears
from tests.graph.conftest import artifact_folder, graph_mode
from tests.vendor.cpu.test_native import (
    DTYPES,
    FLOAT32_UNIT,
    library,
    needs_compiler,
    reason_without_tiles,
    resident_bytes,
    tensor,
)

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]
__all__ = ["artifact_folder", "graph_mode", "library"]

Parts = tuple[Tensor, Tensor, Tensor | None]


def product(x: Tensor, parts: Parts, bias: Tensor | None = None, group_size: int = 0) -> Tensor:
    qweight, scales, offset = parts
    return torch.ops.dlinfer_cpu.weight_quant_matmul.default(x, qweight, scales, offset, bias, group_size)


def weight_of(
    seed: int,
    in_features: int,
    words: int,
    group_size: int,
    dtype: torch.dtype = torch.float16,
    zeros: bool = True,
) -> Parts:
    """Any bits for numbers and zero points, scales around 0.1."""
    groups = AWQ.of_groups(group_size).groups(in_features)
    generator = torch.Generator().manual_seed(seed)

    def any_words(rows: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (rows, words), generator=generator).int()

    scales = (torch.rand(groups, words * 8, generator=generator) * 0.1 + 0.05).to(dtype)
    return any_words(in_features), scales, any_words(groups) if zeros else None


def assert_close(out: Tensor, x: Tensor, parts: Parts, bias: Tensor | None, group_size: int) -> None:
    """Within the bound of float32 sums in any order (Higham, section 4.2), and one rounding to the dtype.

    Summed are x * (q - 8), and (8 - zero) times the sum of x, so it is their magnitudes that count.
    """
    qweight, scales, offset = parts
    packing = AWQ.of_groups(group_size)
    assert out.dtype == x.dtype
    assert out.shape == (*x.shape[:-1], scales.shape[1])
    exact = x.double() @ packing.dequantise(qweight, scales, offset, torch.float64)
    apart = packing.dequantise(qweight, scales, None, torch.float64).abs()
    if offset is not None:
        group_of = torch.arange(qweight.shape[0]) // (group_size or max(qweight.shape[0], 1))
        apart += ((packing.unpack_zeros(offset) - 8).abs() * scales.double())[group_of]
    magnitudes = x.double().abs() @ apart
    if bias is not None:
        exact, magnitudes = exact + bias.double(), magnitudes + bias.double().abs()
    kind = torch.finfo(x.dtype)
    allowed = (x.shape[-1] + 4) * FLOAT32_UNIT * magnitudes + kind.eps / 2 * exact.abs()
    allowed += kind.smallest_normal * kind.eps  # the spacing of subnormals
    if x.dtype is torch.bfloat16:
        allowed += x.shape[-1] * kind.smallest_normal * 16  # taken for zero by the instruction
    excess = (out.double() - exact).abs() - allowed
    assert excess.numel() == 0 or excess.max() <= 0, f"beyond the bound by {excess.max():.2e}"


def check_sizes() -> None:
    """Sizes around every boundary of the kernel: lanes, blocks, strips, groups, rows of a tile and of a chunk."""
    for dtype in DTYPES:
        for rows in (0, 1, 2, 3, 4, 6, 7, 12, 13, 25, 48, 49, 96, 97):
            for words, in_features, group_size in (
                *((0, 8, 8), (1, 1, 1), (2, 0, 8), (3, 7, 4), (4, 31, 32), (8, 33, 16), (9, 128, 128)),
                *((16, 129, 0), (17, 260, 130), (31, 64, 8), (33, 300, 256)),
            ):
                x = tensor(rows, (rows, in_features), dtype)
                parts = weight_of(1, in_features, words, group_size, zeros=rows % 2 == 0)
                bias = tensor(2, (words * 8,), torch.float16) if rows % 3 else None
                assert_close(product(x, parts, bias, group_size), x, parts, bias, group_size)


@given(
    dtype=st.sampled_from(DTYPES),
    scales=st.sampled_from(DTYPES),
    rows=st.integers(0, 110),
    words=st.integers(0, 40),
    in_features=st.integers(0, 500),
    group_size=st.sampled_from([0, 1, 5, 32, 64, 128, 1000]),
    gap=st.integers(0, 9),
    with_zeros=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(torch.float16, torch.float16, 1, 608, 896, 128, 0, True, True, 0)
@example(torch.bfloat16, torch.float16, 100, 112, 1216, 64, 0, True, False, 0)
@settings(max_examples=100, deadline=None)
def test_against_float64(
    dtype, scales, rows, words, in_features, group_size, gap, with_zeros, with_bias, seed
):
    x = tensor(seed, (rows, in_features), dtype, gap)
    parts = weight_of(seed, in_features, words, group_size, scales, with_zeros)
    bias = tensor(seed + 2, (words * 8,), scales) if with_bias else None
    assert_close(product(x, parts, bias, group_size), x, parts, bias, group_size)


def test_boundaries():
    check_sizes()


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(tensor(0, (96,), torch.bfloat16), id="a vector"),
        pytest.param(tensor(0, (1, 4, 96), torch.bfloat16), id="three dimensions"),
        pytest.param(tensor(0, (2, 3, 96), torch.bfloat16, gap=7), id="three dimensions with gaps"),
        pytest.param(tensor(0, (96, 5), torch.bfloat16).t(), id="transposed"),
        pytest.param(tensor(0, (6, 192), torch.bfloat16)[::2, ::2], id="every other element"),
        pytest.param(tensor(0, (1, 96), torch.bfloat16).expand(4, 96), id="rows that overlap"),
        pytest.param(tensor(0, (5, 97), torch.bfloat16)[:, 1:], id="off the alignment"),
        pytest.param(tensor(0, (2, 0, 96), torch.bfloat16), id="no rows"),
    ],
)
def test_layouts_of_x(x):
    parts = weight_of(1, 96, 5, 32)
    out = product(x, parts, None, 32)
    assert_close(out, x, parts, None, 32)
    assert out.is_contiguous()


@pytest.mark.parametrize("rows", [1, 40])
def test_a_part_of_a_larger_weight(rows):
    qweight, scales, offset = weight_of(1, 160, 60, 32)
    assert offset is not None
    x = tensor(0, (rows, 64), torch.float16)
    for some in (slice(3, 40), slice(0, 60, 2)):
        columns = torch.arange(480).view(60, 8)[some].flatten()
        parts = qweight[32:96, some], scales[1:3, columns], offset[1:3, some]
        assert_close(product(x, parts, None, 32), x, parts, None, 32)
    turned = (qweight.t().contiguous().t(), scales.t().contiguous().t(), offset.t().contiguous().t())
    x = tensor(0, (rows, 160), torch.float16)
    assert torch.equal(product(x, turned, None, 32), product(x, (qweight, scales, offset), None, 32))


@pytest.mark.parametrize("words", [20, 520])  # 520: rows so wide that strips have fewer of them
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_in_any_company(dtype, words):
    # Greedy tokens must not depend on who else is in the batch. Few rows have numbers widened by each tile, more
    # have them widened once for at most 256 rows. AMX takes five rows of bfloat16 and more, in an order of its own.
    x, parts = tensor(0, (300, 400), dtype), weight_of(1, 400, words, 128)
    few = 4 if dtype is torch.bfloat16 and not reason_without_tiles() else 0
    together = product(x, parts, None, 128)
    for first, rows in ((0, 1), (5, 2), (7, 7), (0, 12), (9, 24), (190, 25), (8, 72), (4, 73), (1, 257)):
        some = product(x[first : first + rows], parts, None, 128)
        company = product(x[first : first + few], parts, None, 128) if rows <= few else together[first:]
        assert torch.equal(some, company[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("words", "in_features", "group_size"), [(511, 300, 0), (512, 193, 128), (530, 129, 64), (1100, 65, 32)]
)
def test_wide_rows(dtype, words, in_features, group_size):
    for rows in (1, 3, 25):
        x = tensor(rows, (rows, in_features), dtype)
        parts = weight_of(1, in_features, words, group_size)
        assert_close(product(x, parts, None, group_size), x, parts, None, group_size)


@pytest.mark.parametrize("rows", [1, 24, 60, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_bit(rows, dtype):
    x, parts = (
        tensor(0, (rows, 512), dtype),
        weight_of(1, 512, 700, 64),
    )  # several pieces for each of two threads
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3, 5, 16):
            torch.set_num_threads(threads)
            outs.append(product(x, parts, None, 64))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert_close(outs[0], x, parts, None, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_outputs(dtype):
    x, parts = tensor(0, (3, 70), dtype), weight_of(1, 70, 5, 32)
    x[1, 69], parts[1][1, 5] = torch.nan, torch.inf
    out = product(x, parts, None, 32)
    assert out[1].isnan().all()
    assert not out[:, 5].isfinite().any()
    out = out[[0, 2]]
    out[:, 5] = 0
    assert out.isfinite().all()
    x[1, 69] = torch.inf
    assert not product(x, parts, None, 32)[1].isfinite().any()


def test_overflow_is_infinity():
    x, (qweight, scales, _) = torch.full((2, 640), 1e3, dtype=torch.float16), weight_of(1, 640, 2, 64)
    fifteen = torch.full_like(qweight, -1)
    assert product(x, (fifteen, scales * 10, None), None, 64).isposinf().all()
    assert product(-x, (fifteen, scales * 10, None), None, 64).isneginf().all()


@pytest.mark.parametrize(("rows", "in_features", "words"), [(1, 33, 19), (13, 64, 16), (30, 37, 5)])
def test_nothing_behind_the_end_is_read(rows, in_features, words):
    def before_a_wall(like: Tensor) -> Tensor:
        """A copy whose last byte is the last one that may be read."""
        length = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, length + mmap.PAGESIZE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(whole.data_ptr() + length), mmap.PAGESIZE, 0) == 0
        return whole[length - like.nbytes : length].view(like.dtype).view(like.shape).copy_(like)

    x, bias = (
        before_a_wall(tensor(0, shape, torch.float16)) for shape in ((rows, in_features), (words * 8,))
    )
    qweight, scales, offset = weight_of(1, in_features, words, 16)
    assert offset is not None
    parts = before_a_wall(qweight), before_a_wall(scales), before_a_wall(offset)
    assert_close(product(x, parts, bias, 16), x, parts, bias, 16)


def test_callers_at_once():
    x, parts = tensor(0, (4, 896), torch.float16), weight_of(1, 896, 100, 128)
    expected = product(x, parts, None, 128)
    wrong = []

    def call() -> None:
        wrong.extend(i for i in range(30) if not torch.equal(product(x, parts, None, 128), expected))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_no_float_copy_of_the_weight_is_made():
    # 32 MiB of words, which are 256 MiB in float32 and 128 MiB in float16.
    in_features, words = 4096, 2048
    parts = weight_of(0, in_features, words, 128)
    x = [tensor(0, (rows, in_features), torch.float16) for rows in (1, 64)]
    for one in x:  # what the first call makes for good: threads, results
        product(one, parts, None, 128)
    before = resident_bytes()
    kept = [product(one, parts, None, 128) for one in x]
    assert resident_bytes() - before < 8 << 20
    assert sum(out.untyped_storage().nbytes() for out in kept) < 4 << 20


def test_opcheck():
    for rows in (1, 9):
        args = (tensor(0, (2, rows, 40), torch.bfloat16), *weight_of(1, 40, 3, 16), None, 16)
        torch.library.opcheck(torch.ops.dlinfer_cpu.weight_quant_matmul.default, args)


one = torch.ones(2, 16)
packed, scale = torch.zeros(16, 3, dtype=torch.int32), torch.ones(2, 24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(()), packed, scale, None, None, 8), "number of dimensions"),
        ((one[:, :5], packed, scale, None, None, 8), "x has 5 in_features, qweight has 16"),
        ((one, packed, scale[:1], None, None, 8), r"scales are \[groups = 2, out_features = 24\]"),
        ((one, packed, scale[:, :16], None, None, 8), "out_features = 24"),
        ((one, packed, scale, packed[:1], None, 8), r"offset is \[groups = 2, words = 3\]"),
        ((one, packed, scale, None, one[0], 8), r"bias is \[out_features = 24\]"),
        ((one, packed.long(), scale, None, None, 8), "int32"),
        ((one.double(), packed, scale, None, None, 8), "x is no float32, bfloat16 or float16"),
        ((one, packed, scale.double(), None, None, 8), "scales is no float32, bfloat16 or float16"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dlinfer_cpu.weight_quant_matmul.default(*arguments)


@pytest.mark.parametrize("wide", ["scales", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_float64_beside_x_is_torchs(dtype, wide, graph_mode):
    x, (qweight, scales, offset) = tensor(0, (5, 96), dtype), weight_of(1, 96, 8, 32)
    bias = tensor(2, (64,), torch.float16)
    given = {"scales": scales, "bias": bias}
    given[wide] = given[wide].double()

    def layer(x):
        rest = {"offset": offset, "bias": given["bias"], "group_size": 32}
        return ops.weight_quant_matmul(x, qweight, given["scales"], **rest)

    for call in (layer, torch.compile(layer, backend="dlinfer", options={"engine": "inductor"})):
        assert_close(call(x), x, (qweight, scales, offset), bias, 32)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_without_the_library_columns_are_widened_some_at_a_time(dtype, monkeypatch):
    monkeypatch.setattr(linears, "compiled", lambda *given: None)
    widened = []
    whole = AWQ.__class__.dequantise

    def watched(self, qweight: Tensor, *args, **kwargs) -> Tensor:
        widened.append(qweight.shape[1])
        return whole(self, qweight, *args, **kwargs)

    monkeypatch.setattr(AWQ.__class__, "dequantise", watched)
    x, (qweight, scales, offset) = tensor(0, (5, 96), dtype), weight_of(1, 96, 130, 32)
    bias = tensor(2, (1040,), torch.float16)
    out = linears.weight_quant_matmul(x, qweight, scales, offset, bias, 32)
    assert widened == [64, 64, 2]
    assert_close(out, x, (qweight, scales, offset), bias, 32)
    assert linears.weight_quant_matmul(x, qweight[:, :0], scales[:, :0], None, None, 32).shape == (5, 0)
