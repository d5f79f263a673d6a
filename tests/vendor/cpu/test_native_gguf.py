"""The C++ kernels of GGUF's blocks: numbers have the reference's bits, and sums those of float64, rounded."""

import pytest
import torch
from torch import Tensor

from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised import gguf
from dlinfer.ops.quantised.gguf_samples import packed
from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import needs_compiler

pytestmark = [needs_compiler, pytest.mark.usefixtures("library")]

TYPES = pytest.mark.parametrize("number", gguf.TYPES, ids=lambda number: gguf.TYPES[number].name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
COLUMNS = 1536  # more than are unpacked at a time


@pytest.fixture(scope="module")
def library() -> None:
    assert native.why_not() is None


def unpack(weight: Tensor, types: list[int], rows: list[int], columns: int, dtype: torch.dtype) -> Tensor:
    return torch.ops.dlinfer_cpu.unpack_gguf.default(weight, types, rows, columns, dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, types: list[int], rows: list[int]) -> Tensor:
    return torch.ops.dlinfer_cpu.linear_gguf.default(x, weight, bias, types, rows)


def random_bytes(size: int) -> Tensor:
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_normal_numbers(got: Tensor, want: Tensor) -> None:
    """The same bits; where bfloat16 is subnormal, 0 will do, as the dot instruction takes it for 0."""
    assert torch.equal(got.isnan(), want.isnan())
    tiny = (
        want.abs() < torch.finfo(want.dtype).tiny
        if want.dtype is torch.bfloat16
        else torch.zeros_like(want).bool()
    )
    compared = ~want.isnan() & ~tiny
    assert torch.equal(bits(got)[compared], bits(want)[compared])
    assert bool((got[tiny].abs() <= torch.finfo(want.dtype).tiny).all())


@TYPES
@DTYPES
def test_any_bytes_are_unpacked_as_by_the_reference(number: int, dtype: torch.dtype) -> None:
    kind = gguf.TYPES[number]
    stored = random_bytes(5 * kind.row_bytes(COLUMNS))
    want = gguf.unpack(stored, [number], [5], COLUMNS, torch.float32).to(dtype)
    assert_same_normal_numbers(unpack(stored, [number], [5], COLUMNS, dtype), want)


@TYPES
def test_blocks_at_an_odd_address(number: int) -> None:
    kind = gguf.TYPES[number]
    stored = random_bytes(3 * kind.row_bytes(COLUMNS))
    shifted = torch.cat([stored[:1], stored])[1:]
    got = unpack(shifted, [number], [3], COLUMNS, torch.float32)
    assert_same_normal_numbers(got, gguf.unpack(stored, [number], [3], COLUMNS, torch.float32))


@TYPES
@DTYPES
@pytest.mark.parametrize("inputs", [1, 3, 9, 40, 130])
def test_products(number: int, dtype: torch.dtype, inputs: int) -> None:
    make, rows = SampleMaker(dtype), 37  # of no whole blocks of rows
    weight = packed(make, [number], [rows], COLUMNS)
    x, bias = make.tensor(inputs, COLUMNS), make.tensor(rows)
    got = product(x, weight, bias, [number], [rows])
    numbers = gguf.unpack(weight, [number], [rows], COLUMNS, torch.float32).to(dtype)
    want = x.double() @ numbers.double().t() + bias.double()
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@DTYPES
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    make, types, rows = SampleMaker(dtype), [12, 14, 2], [33, 6, 18]
    weight, x = packed(make, types, rows, COLUMNS), make.tensor(30, COLUMNS)
    together = product(x, weight, None, types, rows)
    for first, end in ((0, 1), (0, 2), (7, 12), (3, 30)):
        some = product(x[first:end], weight, None, types, rows)
        assert torch.equal(bits(some), bits(together[first:end]))


def test_joined_matrices_are_those_alone() -> None:
    make, types, rows = SampleMaker(torch.bfloat16), [12, 13, 8, 30], [20, 7, 40, 3]
    parts = [packed(make, [kind], [count], 512) for kind, count in zip(types, rows, strict=True)]
    x = make.tensor(4, 512)
    alone = [
        product(x, part, None, [kind], [count]) for part, kind, count in zip(parts, types, rows, strict=True)
    ]
    assert torch.equal(product(x, torch.cat(parts), None, types, rows), torch.cat(alone, -1))


def test_strided_inputs() -> None:
    make = SampleMaker(torch.float32)
    weight, bias = packed(make, [8], [9], 64), make.tensor(9, 2)
    wide, turned = make.tensor(5, 128), make.tensor(64, 6)
    for x in (wide[:, 32:96], turned.t(), turned.t().view(2, 3, 64)):
        want = product(x.contiguous(), weight, bias[:, 0].contiguous(), [8], [9])
        assert torch.equal(product(x, weight, bias[:, 0], [8], [9]), want)


@TYPES
def test_embedding(number: int) -> None:
    make = SampleMaker(torch.float32)
    weight = packed(make, [number], [11], 512)
    table = gguf.unpack(weight, [number], [11], 512, torch.float32)
    rows_of = torch.ops.dlinfer_cpu.embedding_gguf.default
    for places in (
        torch.tensor([[10, 0, 3], [3, 3, 9]]),
        torch.tensor([5], dtype=torch.int32),
        torch.tensor(7),
    ):
        got = rows_of(places, weight, number, 11, 512, torch.float32)
        assert torch.equal(bits(got), bits(table[places.long()]))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, w: product(x, w[:-1], None, [12], [4]), "too many"),
        (lambda x, w: product(x, w, None, [5], [4]), "of type 5"),
        (lambda x, w: product(x, w, None, [12, 12], [4]), "2 types"),
        (lambda x, w: product(x, w, None, [12], [-4]), "-4 rows"),
        (lambda x, w: product(x[:, :100], w, None, [12], [4]), "100 numbers"),
        (lambda x, w: product(x, w.to(torch.int8), None, [12], [4]), "uint8"),
        (lambda x, w: product(x, w, torch.zeros(3), [12], [4]), "bias"),
        (lambda x, w: torch.ops.dlinfer_cpu.embedding_gguf.default(
            torch.tensor([4]), w, 12, 4, 256, torch.float32), "index out of range"),
    ],
)  # fmt: skip
def test_refused(call, said: str) -> None:
    weight = torch.zeros(4 * 144, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=said):
        call(torch.zeros(2, 256), weight)
