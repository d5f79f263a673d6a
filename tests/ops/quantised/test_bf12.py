"""BF12: every bit comes back, the bytes are those of the format, written out here number by number, and refusals."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlinfer import ops, vendor
from dlinfer.errors import OpArgumentError
from dlinfer.ops.quantised import bf12

SPECIAL = (
    0x0000, 0x8000,  # zeros
    0x0001, 0x807F,  # subnormals
    0x0080, 0x80FF,  # the smallest normal ones
    0x7F7F, 0xFF7F, 0x7F80, 0xFF80,  # the largest, and infinities
    0x7F81, 0x7FC0, 0xFFC1, 0xFFFF,  # NaN: signalling, quiet, with payloads
)  # fmt: skip


def matrix(bits: list[list[int]]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    return one.shape == other.shape and torch.equal(one.view(torch.int16), other.view(torch.int16))


def spelled(bits: list[list[int]], rows: int, columns: int) -> bytes:
    """The format once more, slowly: nothing is shared with the packer."""
    strips, groups = -(-rows // 4), -(-columns // 128)
    exponents = [number >> 7 & 0xFF for row in bits for number in row]

    def left(base: int) -> int:
        return sum(1 for one in exponents if one and not base < one <= base + 15)

    base = min(range(241), key=left)
    words: list[int] = []
    entries: list[list[int]] = [[] for _ in range(strips)]
    for strip in range(strips):
        for group in range(groups):
            for at in range(4):
                row, fields, codes = 4 * strip + at, [0] * 128, [0] * 128
                for place in range(128):
                    column = 128 * group + place
                    number = bits[row][column] if row < rows and column < columns else 0
                    exponent = number >> 7 & 0xFF
                    if exponent and not base < exponent <= base + 15:
                        entries[strip].append(column << 18 | at << 16 | number)
                        continue
                    fields[place] = number & 0x807F
                    codes[place] = exponent - base if exponent else 0
                turned = [(one << 8 | one >> 8) & 0xFFFF for one in fields]
                words += [fields[j] | turned[32 + j] for j in range(32)]
                words += [fields[64 + j] | turned[96 + j] for j in range(32)]
                words += [sum(codes[32 * q + j] << 4 * q for q in range(4)) for j in range(32)]
        entries[strip].sort()
    starts = [sum(map(len, entries[:strip])) for strip in range(strips + 1)]
    behind = [base, *starts, *(entry for one in entries for entry in one)]
    return struct.pack(f"<{len(words)}H{len(behind)}q", *words, *behind)


def data(packed: Tensor) -> bytes:
    return bytes(packed.tolist())


BITS = st.one_of(
    st.integers(0, 0xFFFF),
    st.sampled_from(SPECIAL),
    st.integers(0x3C00, 0x3FFF),  # neighbours, as weights are
)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[int]]:
    """A few drawn numbers over and over, with others put in."""
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 270))
    some = draw(st.lists(BITS, min_size=1, max_size=12))
    bits = [[some[(7 * row + column) % len(some)] for column in range(columns)] for row in range(rows)]
    if rows and columns:
        places = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1))
        for (row, column), number in draw(st.dictionaries(places, BITS, max_size=6)).items():
            bits[row][column] = number
    return bits


def of(bits: list[list[int]]) -> Tensor:
    return matrix(bits) if bits and bits[0] else torch.empty(len(bits), 0, dtype=torch.bfloat16)


@given(bits=matrices())
@settings(max_examples=60, deadline=None)
def test_packing_and_back(bits: list[list[int]]):
    weight = of(bits)
    rows, columns = weight.shape
    packed = bf12.pack(weight)
    assert packed.dtype is torch.uint8
    assert data(packed) == spelled(bits, rows, columns)
    assert same(bf12.unpack(packed, rows, columns), weight)


@given(bits=matrices(), drawn=st.lists(st.integers(0, 2**20), max_size=12))
@settings(max_examples=40, deadline=None)
def test_some_rows(bits: list[list[int]], drawn: list[int]):
    weight = of(bits)
    rows, columns = weight.shape
    indices = torch.tensor([one % rows for one in drawn] if rows else [], dtype=torch.int64).view(1, -1)
    assert same(bf12.rows_of(bf12.pack(weight), indices, rows, columns), weight[indices])


def test_every_bit_pattern_comes_back():
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for shape in ((256, 256), (1, 2**16), (2**16, 1)):
        packed = bf12.pack(weight.view(shape))
        assert same(bf12.unpack(packed, *shape), weight.view(shape))
        # All exponents are as frequent, so 15 beside 0 have a code, from 1 on, and 240 have none.
        assert packed.numel() == bf12.packed_bytes(*shape, exceptions=240 * 256)


def test_bytes_by_hand():
    bits = [[0] * 130 for _ in range(5)]
    bits[0][0], bits[0][32], bits[0][64], bits[0][96] = (
        0x3F80,
        0xBFC1,
        0x3F05,
        0x8001,
    )  # exponents 127, 127, 126, 0
    bits[4][129] = 0x7FC1  # NaN, in the second strip and group
    bits[1][2] = 0x4F00  # exponent 158
    packed = bf12.pack(matrix(bits))
    assert packed.numel() == bf12.packed_bytes(5, 130, 2) == 2 * 2 * 768 + 8 * (1 + 3 + 2)
    words = packed[: 4 * 768].view(torch.int16).view(2, 2, 4, 96).int() & 0xFFFF
    base = 112  # the smallest whose 15 reach 127: 113..127
    assert words[0, 0, 0, [0, 32, 64]].tolist() == [0x0000 | 0x4180, 0x0005 | 0x0180, 0x0EFF]
    assert int(words.count_nonzero()) == 3
    numbers = packed[4 * 768 :].view(torch.int64).tolist()
    assert numbers == [base, 0, 1, 2, 2 << 18 | 1 << 16 | 0x4F00, 129 << 18 | 0x7FC1]


def test_a_base_among_equals_is_the_smallest():
    for bits, base in (([[0, 0x8000]], 0), ([[0x3F80]], 112), ([[0x7F80]], 240), ([[0x0080]], 0)):
        packed = bf12.pack(matrix(bits))
        assert packed[768:776].view(torch.int64).item() == base
        assert packed.numel() == bf12.packed_bytes(1, len(bits[0]))


def test_a_matrix_that_is_packed_in_pieces(monkeypatch: pytest.MonkeyPatch):
    bits = torch.randint(-(2**15), 2**15, (37, 140), generator=torch.Generator().manual_seed(1))
    weight = bits.to(torch.int16).view(torch.bfloat16)
    whole = bf12.pack(weight)
    monkeypatch.setattr(bf12, "_AT_A_TIME", 1200)  # 8 rows
    assert torch.equal(bf12.pack(weight), whole)
    assert same(bf12.unpack(whole, 37, 140), weight)


def off_by_three(packed: Tensor) -> Tensor:
    """The same bytes where no integer of more than one lies evenly."""
    return torch.zeros(packed.numel() + 6, dtype=torch.uint8)[3:-3].copy_(packed)


def test_any_strides_and_bytes_that_lie_anywhere():
    weight = torch.randn(130, 7, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = bf12.pack(weight.t())
    assert torch.equal(packed, bf12.pack(weight.t().contiguous()))
    assert same(bf12.unpack(off_by_three(packed), 7, 130), weight.t())


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
def test_ops_take_bytes_that_lie_anywhere(vendor_name: str):
    vendor.use(vendor_name)
    weight = torch.randn(7, 130, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[::3, ::7] *= 1e-30
    moved = off_by_three(bf12.pack(weight))
    x = torch.randn(3, 130)
    want = ops.linear(x, weight.float())
    torch.testing.assert_close(ops.linear_bf12(x, moved, out_features=7), want)
    assert same(ops.embedding_bf12(torch.tensor([6, 0]), moved, 7, 130), weight[[6, 0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_reference_is_linear_of_the_weight_that_was_packed(dtype: torch.dtype):
    vendor.use("reference")
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(19, 300, generator=generator).bfloat16()
    weight[::3, ::7] *= 1e-30
    x, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((2, 5, 300), (19,)))
    found = ops.linear_bf12(x, bf12.pack(weight), bias, out_features=19)
    assert torch.equal(found, ops.linear(x, weight.to(dtype), bias))


PACKED = bf12.pack(matrix([[0x3F80] * 130, [0x0080] * 130]))  # 130 exceptions


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: bf12.pack(torch.ones(2, 2)), "argument weight: expected a bfloat16 tensor, given torch.float32"),
        (lambda: bf12.pack(torch.ones(2).bfloat16()), "argument weight: expected 2 dimensions"),
        (lambda: bf12.unpack(PACKED.view(torch.int8), 2, 130), "argument packed: expected a uint8 tensor"),
        (lambda: bf12.unpack(PACKED[None], 2, 130), "argument packed: expected 1 dimensions"),
        (lambda: bf12.unpack(PACKED.repeat_interleave(2)[::2], 2, 130), "expected a contiguous tensor"),
        (lambda: bf12.unpack(PACKED[:-1], 2, 130), "and 8 for each exception, given"),
        (lambda: bf12.unpack(PACKED[:-8], 2, 130), r"2600 bytes for \[2, 130\] with 130 exceptions, given 2592"),
        (lambda: bf12.unpack(torch.cat([PACKED, PACKED[:8]]), 2, 130), "with 130 exceptions, given 2608"),
        (lambda: bf12.unpack(PACKED, 2, 700), r"bytes for \[2, 700\]"),
        (lambda: bf12.unpack(PACKED, -1, 130), "argument rows: expected 0 or more, given -1"),
        (lambda: bf12.unpack(PACKED, 2, -1), "argument columns: expected 0 or more, given -1"),
        (lambda: bf12.rows_of(PACKED[:-8], torch.tensor([0]), 2, 130), "with 130 exceptions"),
    ],
)  # fmt: skip
def test_what_is_refused(call, told: str):
    with pytest.raises(OpArgumentError, match=told):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_give_the_numbers_of_plain_stacks(dtype):
    generator = torch.Generator().manual_seed(3)
    gate_up, down = (
        (torch.randn(size, generator=generator) * size[-1] ** -0.5).bfloat16()
        for size in ((5, 26, 131), (5, 131, 13))
    )
    gate_up[:, ::3, ::7] *= 1e-30
    x = torch.randn(7, 131, generator=generator).to(dtype)
    weights, ids = torch.randn(7, 5, generator=generator).softmax(-1).topk(2)
    packed = [bf12.pack(one.flatten(0, 1)) for one in (gate_up, down)]
    found = ops.fused_moe_bf12.reference(x, *packed, weights, ids, True, 5, 13)
    plain = ops.fused_moe.reference(x, gate_up.to(dtype), down.to(dtype), weights, ids, 2, True)
    assert torch.equal(found, plain)
