"""The C++ linear against float64, for every instruction set that this machine can play, and the cache it lives in."""

import ctypes
import mmap
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from dlinfer.graph.cache.fingerprint import cpu_flags
from dlinfer.settings import current
from dlinfer.vendor.cpu import VENDOR, isa, native

REPOSITORY = Path(__file__).parents[3]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32_UNIT = 2.0**-24  # the largest relative error of one float32 rounding


def without_compiler() -> bool:
    try:
        native.compiler()
    except native.BuildError:
        return True
    return False


def reason_without_tiles() -> str:
    """Why this process does not run the kernels with AMX tiles; empty if it does."""
    level = current().cpu_isa
    if level:
        return "" if isa.modelled(level) == "amx" else f"DLINFER_CPU_ISA is {level}"
    missing = [flag for flag in ("amx_tile", "amx_bf16", "avx512_bf16") if flag not in cpu_flags().split()]
    return f"this CPU has no {', '.join(missing)}" if missing else ""


def reason_without_panels() -> str:
    """Why this process does not run the kernel for many rows with AMX tiles or AVX512-BF16; empty if it does."""
    level = current().cpu_isa
    if level:
        fits = isa.modelled(level) in ("avx512_bf16", "avx512_fp16", "amx")
        return "" if fits else f"DLINFER_CPU_ISA is {level}"
    return "" if "avx512_bf16" in cpu_flags().split() else "this CPU has no avx512_bf16"


UNKNOWN = "torch 2.12 printed the reason to stderr"
"""The text of an error of torch's C interface, where torch does not tell more."""

needs_compiler = pytest.mark.skipif(without_compiler(), reason="no C++ compiler is installed")


@pytest.fixture(scope="module")
def library() -> None:
    """The library of this process; kept between test runs in the user's cache folder."""
    assert native.why_not() is None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.dlinfer_cpu.linear.default(x, weight, bias)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return torch.ops.dlinfer_cpu.linears.default(x, weights, biases)


def assert_close(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within the bound of a float32 sum in any order, and one rounding to the dtype.

    The sum of n products errs by at most about n float32 units of the sum of their magnitudes (Higham, Accuracy and
    Stability of Numerical Algorithms, section 4.2); the rounding by half the dtype's spacing.
    """
    assert out.dtype == x.dtype
    assert out.shape == (*x.shape[:-1], weight.shape[0])
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitudes = functional.linear(
        x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs()
    )
    kind = torch.finfo(x.dtype)
    allowed = (x.shape[-1] + 2) * FLOAT32_UNIT * magnitudes + kind.eps / 2 * exact.abs()
    allowed += kind.smallest_normal * kind.eps  # the spacing of subnormals
    if x.dtype is torch.bfloat16:
        allowed += magnitudes.shape[-1] * kind.smallest_normal  # taken for zero by the instruction
    excess = (out.double() - exact).abs() - allowed
    assert excess.numel() == 0 or excess.max() <= 0, f"beyond the bound by {excess.max():.2e}"


def tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype, gap: int = 0) -> Tensor:
    """Normal numbers; rows lie ``gap`` elements apart."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + gap, generator=generator).to(dtype)
    return wide[..., : shape[-1]]


def check_sizes() -> None:
    """Sizes around every boundary of the kernel: lanes, tiles, blocks, chunks, and the limit of rows."""
    for dtype in DTYPES:
        for rows in (0, 1, 2, 3, 5, 8, 9, 17, 33, 64, 65):
            for out_features, in_features in (
                *((0, 8), (1, 1), (3, 0), (5, 7), (15, 31), (16, 32), (17, 33), (19, 63), (33, 100)),
                *((4, 511), (35, 1025), (20, 2080)),
            ):
                x = tensor(rows, (rows, in_features), dtype)
                weight = tensor(1, (out_features, in_features), dtype)
                bias = tensor(2, (out_features,), dtype) if rows % 2 else None
                assert_close(linear(x, weight, bias), x, weight, bias)


# --- the numbers


@needs_compiler
@pytest.mark.usefixtures("library")
class TestNumbers:
    @given(
        dtype=st.sampled_from(DTYPES),
        rows=st.integers(0, 40),
        out_features=st.integers(0, 70),
        in_features=st.integers(0, 1300),
        gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
        with_bias=st.booleans(),
        seed=st.integers(0, 2**31),
    )
    @example(torch.bfloat16, 1, 1152, 896, (0, 0), True, 0)
    @example(torch.bfloat16, 8, 896, 4864, (0, 0), False, 0)
    @settings(max_examples=200, deadline=None)
    def test_against_float64(self, dtype, rows, out_features, in_features, gaps, with_bias, seed):
        x = tensor(seed, (rows, in_features), dtype, gaps[0])
        weight = tensor(seed + 1, (out_features, in_features), dtype, gaps[1])
        bias = tensor(seed + 2, (out_features,), dtype) if with_bias else None
        assert_close(linear(x, weight, bias), x, weight, bias)

    def test_boundaries(self):
        check_sizes()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", [3, 200])
    def test_several_weights_equal_one_by_one(self, dtype, rows):
        x = tensor(0, (rows, 200), dtype)
        weights = [tensor(i, (size, 200), dtype) for i, size in enumerate((64, 1, 17, 0, 300))]
        biases = [tensor(i, (w.shape[0],), dtype) if i % 2 else None for i, w in enumerate(weights)]
        for out, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
            assert torch.equal(out, linear(x, weight, bias))
            assert_close(out, x, weight, bias)

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
    def test_layouts_of_x(self, x):
        weight, bias = tensor(1, (40, 96), torch.bfloat16), tensor(2, (40,), torch.bfloat16)
        assert_close(linear(x, weight, bias), x, weight, bias)
        assert linear(x, weight, bias).is_contiguous()

    @pytest.mark.parametrize(
        "weight",
        [
            pytest.param(tensor(1, (96, 96), torch.bfloat16)[20:60], id="a slice of rows"),
            pytest.param(tensor(1, (40, 200), torch.bfloat16)[:, 50:146], id="a slice of columns"),
            pytest.param(tensor(1, (80, 96), torch.bfloat16)[::2], id="every other row"),
            pytest.param(tensor(1, (96, 40), torch.bfloat16).t(), id="stored as in x out"),
            pytest.param(tensor(1, (1, 96), torch.bfloat16).expand(40, 96), id="one row 40 times"),
        ],
    )
    def test_layouts_of_the_weight(self, weight):
        x, bias = tensor(0, (3, 96), torch.bfloat16), tensor(2, (80,), torch.bfloat16)[::2]
        assert_close(linear(x, weight, bias), x, weight, bias)

    def test_other_dtypes_are_left_to_torch(self):
        for dtype in (torch.float64, torch.int64, torch.complex64):
            for rows in (0, 3):
                x, weight = torch.ones(rows, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype)
                assert torch.equal(linear(x, weight), functional.linear(x, weight))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_gives_the_same_bits_in_any_company(self, dtype):
        # Greedy tokens must not depend on who else is in the batch.
        x, weight = tensor(0, (16, 4864), dtype), tensor(1, (50, 4864), dtype)
        together = linear(x, weight)
        tiles = (
            dtype is torch.bfloat16 and not reason_without_tiles()
        )  # their order is another than that of few rows
        for rows in (3, 7, 8, 9) if tiles else (1, 2, 7, 8, 9):
            assert torch.equal(linear(x[:rows], weight), together[:rows])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_threads_do_not_change_a_bit(self, dtype):
        x, weight = tensor(0, (5, 900), dtype), tensor(1, (777, 900), dtype)
        before = torch.get_num_threads()
        try:
            outs = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                outs.append(linear(x, weight))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nan_and_infinity_stay_in_their_outputs(self, dtype):
        x, weight = tensor(0, (3, 70), dtype), tensor(1, (40, 70), dtype)
        x[1, 69], weight[5, 0] = torch.nan, torch.inf
        out = linear(x, weight)
        assert out[1].isnan().all()
        assert out[0, 5].isinf()
        out = out[[0, 2]]
        out[:, 5] = 0
        assert out.isfinite().all()

    def test_overflow_is_infinity(self):
        x = torch.full((2, 64), 1e4, dtype=torch.float16)
        assert linear(x, x).isinf().all()
        assert linear(x, -x).isneginf().all()

    def test_two_callers_at_once(self):
        x, weight = tensor(0, (4, 896), torch.bfloat16), tensor(1, (500, 896), torch.bfloat16)
        expected = linear(x, weight)
        wrong = []

        def call() -> None:
            wrong.extend(i for i in range(50) if not torch.equal(linear(x, weight), expected))

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not wrong


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes() -> int:
    """By the page tables: the number in /proc/self/statm is off by what each core has not added to it yet."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


@needs_compiler
@pytest.mark.usefixtures("library")
class TestResultMemory:
    """Where results lie, small and large: csrc/common/result_memory.h."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
    @pytest.mark.parametrize("size", [(), (0, 3), (5,), (700, 300), (3, 0, 1000)])
    def test_an_empty_tensor_is_like_torch_s(self, dtype, size):
        for stride in {torch.empty(size).stride(), tuple(reversed(torch.empty(size[::-1]).stride()))}:
            ours = torch.ops.dlinfer_cpu.empty_strided.default(size, stride, dtype, dtype.itemsize)
            theirs = torch.empty_strided(size, stride, dtype=dtype)
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
            assert ours.fill_(1).eq(1).all()

    def test_strides_with_gaps(self):
        made = torch.ops.dlinfer_cpu.empty_strided.default((300, 500), (512, 1), torch.float32, 4)
        made[-1, -1] = 3.0
        assert made.untyped_storage().nbytes() == (299 * 512 + 500) * 4

    def test_large_results_are_the_next_ones_without_a_page_fault(self):
        # 16 rows: as many as our own kernel takes with every instruction set.
        x, weight = tensor(0, (16, 64), torch.float32), tensor(1, (20000, 64), torch.float32)
        pages = 16 * 20000 * 4 // mmap.PAGESIZE
        for _ in range(3):
            linear(x, weight)

        def faults() -> int:
            before = page_faults()
            for _ in range(10):
                linear(x, weight)
            return page_faults() - before

        # The system may unmap pages for purposes of its own; results that lie elsewhere cost ten times this each time.
        assert min(faults() for _ in range(5)) < pages

    def test_what_is_in_use_is_not_given_away(self):
        x, weight = tensor(0, (16, 64), torch.float32), tensor(1, (5000, 64), torch.float32)
        expected = linear(x, weight)
        powers = [2.0**i for i in range(8)]  # which change no digit
        kept = [linear(x * power, weight) for power in powers]
        views = [linear(x * power, weight)[3:].T for power in powers]  # of tensors that nobody else holds
        for power, out, view in zip(powers, kept, views, strict=True):
            assert torch.equal(out, expected * power)
            assert torch.equal(view, (expected * power)[3:].T)

    def test_no_more_than_a_bound_is_kept(self):
        def empty(size: int) -> Tensor:
            return torch.ops.dlinfer_cpu.empty_strided.default((size,), (1,), torch.uint8, 1)

        empty(128 << 20)  # takes the place of all that earlier tests left, and is too large for what follows
        size = 32 << 20
        before = resident_bytes()
        made = [empty(size).fill_(1) for _ in range(8)]
        assert resident_bytes() - before > 8 * size * 0.9
        made.clear()
        kept = resident_bytes() - before
        assert kept < 160 << 20, "128 MiB, and what the process did besides"

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", [1, 3, 20, 70, 200])
    def test_weights_of_one_input_have_the_bits_of_each_alone(self, rows, dtype):
        x = tensor(0, (rows, 300), dtype)
        weights = [tensor(i, (out_features, 300), dtype) for i, out_features in enumerate((1, 5, 64, 333))]
        biases = [None, tensor(9, (5,), dtype), None, tensor(8, (333,), dtype)]
        alone = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(linears(x, weights, biases), alone, strict=True))

    def test_callers_at_once(self):
        x, weight = tensor(0, (16, 64), torch.float32), tensor(1, (5000, 64), torch.float32)
        expected = linear(x, weight)
        wrong = []

        def call() -> None:
            wrong.extend(i for i in range(100) if not torch.equal(linear(x, weight), expected))

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not wrong


@needs_compiler
@pytest.mark.skipif(bool(reason_without_panels()), reason=reason_without_panels())
@pytest.mark.usefixtures("library")
class TestManyRows:
    """The kernel with AMX tiles or AVX512-BF16, in bfloat16, and the one for fewer rows beside it."""

    @given(
        rows=st.integers(3, 1030),
        out_features=st.integers(0, 150),
        in_features=st.integers(0, 2100),
        gaps=st.tuples(st.integers(0, 40), st.integers(0, 40)),
        with_bias=st.booleans(),
        seed=st.integers(0, 2**31),
    )
    @example(1024, 896, 896, (0, 0), True, 0)
    @example(380, 300, 4864, (0, 0), True, 0)
    @example(600, 40, 20000, (0, 0), True, 0)  # more of x than is packed at once
    @example(40, 40, 4096, (0, 0), False, 0)
    @example(380, 5701, 70, (0, 0), True, 0)  # a result too wide to be written at once
    @settings(max_examples=100, deadline=None)
    def test_against_float64(self, rows, out_features, in_features, gaps, with_bias, seed):
        x = tensor(seed, (rows, in_features), torch.bfloat16, gaps[0])
        weight = tensor(seed + 1, (out_features, in_features), torch.bfloat16, gaps[1])
        bias = tensor(seed + 2, (out_features,), torch.bfloat16) if with_bias else None
        assert_close(linear(x, weight, bias), x, weight, bias)

    def test_boundaries(self):
        for rows in (3, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 127, 129, 257, 512, 513):
            for out_features, in_features in (
                *((0, 8), (1, 1), (3, 0), (15, 31), (16, 32), (17, 33), (31, 63), (33, 64), (65, 511)),
                *((32, 512), (63, 513), (257, 1023), (300, 1025)),
            ):
                x = tensor(rows, (rows, in_features), torch.bfloat16)
                weight = tensor(1, (out_features, in_features), torch.bfloat16)
                bias = tensor(2, (out_features,), torch.bfloat16) if rows % 2 else None
                assert_close(linear(x, weight, bias), x, weight, bias)

    @pytest.mark.parametrize("in_features", [100, 896, 4864])
    def test_one_rounding_from_torch(self, in_features):
        # Both round a float32 sum with the bias once. The sums differ by their order alone, so the results are equal
        # or neighbours, except for what the order may change.
        x, weight = (
            tensor(0, (100, in_features), torch.bfloat16),
            tensor(1, (200, in_features), torch.bfloat16),
        )
        bias = tensor(2, (200,), torch.bfloat16)
        ours, theirs = linear(x, weight, bias).double(), functional.linear(x, weight, bias).double()
        magnitudes = functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
        spacing = torch.finfo(torch.bfloat16).eps * torch.maximum(ours.abs(), theirs.abs())
        assert ((ours - theirs).abs() <= spacing + 2 * (in_features + 2) * FLOAT32_UNIT * magnitudes).all()
        assert (ours != theirs).double().mean() < 0.02

    @pytest.mark.parametrize("in_features", [200, 2100])
    def test_a_row_gives_the_same_bits_in_any_company(self, in_features):
        x, weight = (
            tensor(0, (1024, in_features), torch.bfloat16),
            tensor(1, (70, in_features), torch.bfloat16),
        )
        together, few = linear(x, weight), torch.ops.dlinfer_cpu.linear_max_inputs.default(torch.bfloat16)
        for first, rows in ((0, few + 1), (5, few + 14), (0, 65), (0, 100), (7, 300), (100, 700)):
            assert torch.equal(linear(x[first : first + rows], weight), together[first : first + rows])

    @pytest.mark.parametrize(("out_features", "in_features"), [(777, 900), (40, 4864), (10, 64)])
    def test_threads_do_not_change_a_bit(self, out_features, in_features):
        x = tensor(0, (333, in_features), torch.bfloat16)
        weights = [tensor(i, (out_features + i, in_features), torch.bfloat16) for i in range(3)]
        before = torch.get_num_threads()
        try:
            outs = []
            for threads in (1, 2, 3, 16):
                torch.set_num_threads(threads)
                outs.append(torch.cat(linears(x, weights, [None] * 3), 1))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(out, outs[0]) for out in outs)

    def test_what_lies_between_and_behind_the_rows_is_not_used(self):
        for in_features in (33, 64, 1030):
            wide_x = torch.full((50, in_features + 40), torch.nan, dtype=torch.bfloat16)
            wide_weight = torch.full((80, in_features + 40), torch.nan, dtype=torch.bfloat16)
            x, weight = wide_x[:41, :in_features], wide_weight[:45, :in_features]
            x.copy_(tensor(0, (41, in_features), torch.bfloat16))
            weight.copy_(tensor(1, (45, in_features), torch.bfloat16))
            assert_close(linear(x, weight), x, weight, None)

    @pytest.mark.parametrize(
        ("rows", "out_features", "in_features"), [(33, 35, 61), (48, 32, 64), (64, 64, 1030)]
    )
    def test_nothing_behind_the_end_is_read(self, rows, out_features, in_features):
        def before_a_wall(like: Tensor) -> Tensor:
            """A copy whose last byte is the last one that may be read."""
            length = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = mmap.mmap(-1, length + mmap.PAGESIZE)
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mprotect(ctypes.c_void_p(whole.data_ptr() + length), mmap.PAGESIZE, 0) == 0
            return whole[length - like.nbytes : length].view(torch.bfloat16).view(like.shape).copy_(like)

        x, weight, bias = (
            before_a_wall(tensor(i, shape, torch.bfloat16))
            for i, shape in enumerate([(rows, in_features), (out_features, in_features), (out_features,)])
        )
        assert_close(linear(x, weight, bias), x, weight, bias)

    def test_weights_may_change_in_place(self):
        x, weight = tensor(0, (40, 96), torch.bfloat16), tensor(1, (50, 96), torch.bfloat16)
        before = linear(x, weight)
        weight.mul_(2)
        assert torch.equal(linear(x, weight), before * 2)

    def test_nan_and_infinity_stay_in_their_outputs(self):
        x, weight = tensor(0, (40, 70), torch.bfloat16), tensor(1, (40, 70), torch.bfloat16)
        x[1, 69], weight[5, 0] = torch.nan, torch.inf
        out = linear(x, weight)
        assert out[1].isnan().all()
        assert out[0, 5].isinf()
        out = out[[0, *range(2, 40)]]
        out[:, 5] = 0
        assert out.isfinite().all()

    def test_callers_at_once_beside_torch_which_uses_tiles_too(self):
        x, weight = tensor(0, (100, 896), torch.bfloat16), tensor(1, (500, 896), torch.bfloat16)
        calls = [linear, functional.linear, linear, functional.linear]
        expected = [call(x, weight) for call in calls]
        wrong = []

        def work(i: int) -> None:
            wrong.extend(i for _ in range(50) if not torch.equal(calls[i](x, weight), expected[i]))

        callers = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not wrong


# --- the op


@needs_compiler
@pytest.mark.usefixtures("library")
class TestOp:
    def test_opcheck(self):
        x, weight, bias = (
            tensor(i, shape, torch.bfloat16) for i, shape in enumerate([(2, 3, 8), (5, 8), (5,)])
        )
        torch.library.opcheck(torch.ops.dlinfer_cpu.linear.default, (x, weight, bias))
        torch.library.opcheck(torch.ops.dlinfer_cpu.linears.default, (x, [weight, weight], [bias, None]))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((torch.ones(()), torch.ones(2, 3), None), "at least one dimension"),
            ((torch.ones(2, 3), torch.ones(3), None), r"weight is \[out_features, in_features\]"),
            ((torch.ones(2, 3), torch.ones(2, 4), None), "3 in_features, weight has 4"),
            ((torch.ones(2, 3), torch.ones(2, 3).double(), None), "x and weight differ in dtype"),
            ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), r"bias is \[out_features = 4\]"),
            ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(4).half()), "x and bias differ in dtype"),
        ],
    )
    def test_wrong_arguments(self, arguments, message):
        with pytest.raises(RuntimeError, match=message):
            linear(*arguments)

    def test_as_many_biases_as_weights(self):
        with pytest.raises(RuntimeError, match="2 weights, 1 biases"):
            linears(torch.ones(1, 3), [torch.ones(2, 3)] * 2, [None])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "feature"),
    [
        ("-mno-amx-tile", "amx_tile"),
        ("-mno-avx512bf16", "avx512_bf16"),
        ("-mno-avx512f", "avx512f"),
        ("-mno-avx2", "avx2"),
        ("-mno-avx", "avx"),
    ],
)
@pytest.mark.full
def test_lesser_instruction_sets(flag, feature, tmp_path):
    if feature not in cpu_flags().split():
        pytest.skip(f"this CPU has no {feature}: {flag} changes nothing")
    code = f"""
import torch
from pathlib import Path
from dlinfer.vendor.cpu import native
torch.ops.load_library(str(native.build(Path({str(tmp_path)!r}), [{flag!r}])))
from tests.vendor.cpu import test_native, test_native_int4, test_native_norm
test_native.check_sizes()
test_native_int4.check_sizes()
test_native_norm.check_sizes()
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, env=environment, timeout=550)


# --- building and keeping


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not tried to load the library yet."""
    monkeypatch.setattr(native, "_outcome", None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A source that compiles at once, in place of ours; returns an empty folder for the library."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "empty.cpp").write_text("int dlinfer_answer() { return 42; }\n")
    monkeypatch.setattr(native, "SOURCES", sources)
    return tmp_path / "kept"


@needs_compiler
class TestCache:
    def test_second_time_from_the_cache(self, quick, capfd):
        path = native.build(quick)
        assert re.search("compiling the CPU kernels .*one or two minutes", capfd.readouterr().err)
        written = path.stat().st_mtime_ns
        assert native.build(quick) == path
        assert path.stat().st_mtime_ns == written
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("damage", ["emptied", "cut short", "one byte changed"])
    def test_a_damaged_library_is_made_anew(self, quick, damage):
        path = native.build(quick)
        sound = path.read_bytes()
        middle = len(sound) // 2
        path.write_bytes(
            {
                "emptied": b"",
                "cut short": sound[:middle],
                "one byte changed": sound[:middle] + bytes([sound[middle] ^ 1]) + sound[middle + 1 :],
            }[damage]
        )
        assert native.build(quick).read_bytes() == sound

    def test_another_source_another_library(self, quick):
        before = native.build(quick)
        (native.SOURCES / "empty.cpp").write_text("int dlinfer_answer() { return 43; }\n")
        assert native.build(quick) != before
        (native.SOURCES / "header.h").write_text("// not even included\n")
        assert len({before, native.build(quick)}) == 2

    def test_flags_and_torch_are_part_of_the_name(self, quick, monkeypatch):
        names = {native.build(quick), native.build(quick, ["-mtune=generic"])}
        monkeypatch.setattr(torch, "__version__", "2.99.0")
        names.add(native.build(quick))
        assert len(names) == 3

    def test_no_half_made_files_stay(self, quick):
        path = native.build(quick)
        assert {item.name for item in quick.iterdir()} == {path.name, path.with_suffix(".lock").name}

    def test_a_lock_left_behind_does_not_matter(self, quick):
        path = native.build(quick)
        path.unlink()
        assert path.with_suffix(".lock").exists()
        assert native.build(quick).exists()

    @pytest.mark.slow
    @pytest.mark.full
    def test_two_processes_race(self, tmp_path):
        code = f"""
import re, torch
from pathlib import Path
from dlinfer.vendor.cpu import native
def runtimes():
    return set(re.findall("/\\\\S*(?:libgomp|libiomp5|libomp)\\\\S*", Path("/proc/self/maps").read_text()))
before = runtimes()
assert native.why_not(Path({str(tmp_path)!r})) is None
x = torch.ones(2, 64)
assert torch.ops.dlinfer_cpu.linear.default(x, x).eq(64).all()
assert runtimes() == before, "a second OpenMP runtime"
"""
        racers = [
            subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
            for _ in range(2)
        ]
        try:
            said = [racer.communicate(timeout=500)[1] for racer in racers]
        finally:
            for racer in racers:
                racer.kill()
        assert [racer.returncode for racer in racers] == [0, 0], said
        assert sum("compiling the CPU kernels" in text for text in said) == 1
        assert sum("waiting for another process" in text for text in said) == 1
        assert len(list(tmp_path.glob("*.so"))) == 1


@pytest.mark.usefixtures("fresh")
class TestReasons:
    def test_no_compiler(self, tmp_path, monkeypatch):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert (
            native.why_not(tmp_path)
            == "no C++ compiler (c++, g++, clang++) is installed; install one, or set CXX"
        )
        probed = VENDOR.probe()
        assert (probed.available, probed.next_step) == (True, "apt install g++")
        assert "plain torch runs in place of the C++ kernels: no C++ compiler" in probed.reason

    def test_the_named_compiler_is_missing(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler -m64")
        assert (
            native.why_not(tmp_path)
            == "no C++ compiler (CXX=no-such-compiler) is installed; install one, or set CXX"
        )

    @needs_compiler
    def test_a_source_that_does_not_compile(self, quick):
        (native.SOURCES / "wrong.cpp").write_text('#error "this CPU is too old"\n')
        reason = native.why_not(quick)
        assert reason is not None
        assert "failed" in reason
        assert "this CPU is too old" in reason
        assert not list(quick.glob("*.so"))

    @needs_compiler
    def test_a_library_that_does_not_load(self, quick):
        (native.SOURCES / "wrong.cpp").write_text("void missing(); void caller() { missing(); }\n")
        reason = native.why_not(quick)
        assert reason is not None
        assert "cannot be loaded" in reason
        assert "missing" in reason

    @needs_compiler
    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        reason = native.why_not(tmp_path / "file" / "folder")
        assert reason == f"the cache folder {tmp_path / 'file' / 'folder'} cannot be used: Not a directory"

    def test_a_compiler_that_cannot_be_read(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "g++ '")
        assert native.why_not(tmp_path) == "ValueError: No closing quotation"

    @needs_compiler
    def test_a_sound_library_needs_no_folder_that_can_be_written(self, quick, monkeypatch):
        path = native.build(quick)

        def read_only(path):
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(native, "_one_process_at_a_time", read_only)
        assert native.build(quick) == path

    @needs_compiler
    def test_a_library_of_other_system_libraries_is_made_again(self, quick, monkeypatch):
        built = native.build(quick).stat().st_ino
        tried = []

        def load(path):
            tried.append(path.stat().st_ino)
            if len(tried) == 1:
                raise native.BuildError("GLIBCXX_3.4.99 not found")

        monkeypatch.setattr(native, "_load_library", load)
        monkeypatch.setattr(native, "_register_fakes", lambda: None)
        assert native.why_not(quick) is None
        assert tried[0] == built
        assert len(tried) == 2

    def test_the_reason_is_found_once(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        first = native.why_not(tmp_path)
        monkeypatch.delenv("CXX")
        native.load(tmp_path)
        assert native.why_not(tmp_path) == first


def test_a_full_disk_is_named_where_the_linker_names_only_itself():
    said = "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status\n"
    script = f"import sys; sys.stderr.write({said!r}); sys.exit(1)"
    with pytest.raises(
        native.BuildError, match=r"the disk is full .*No space left on device.*DLINFER_CACHE_DIR"
    ):
        native._run([sys.executable, "-c", script])
