"""The software model of AVX-512 and AMX (csrc/model): against the processor, where it has them, and the manual."""

import ctypes
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from dlinfer.vendor.cpu import isa, native
from tests.vendor.cpu.test_native import needs_compiler

SOURCE = Path(__file__).with_name("compare.cpp")
ROUNDS = 400
NORMAL = Fraction(2) ** -126  # the smallest of float32

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        bool(isa.missing("avx2")), reason="this CPU has no AVX2, which the model is compiled for"
    ),
]


def built(level: str, folder: Path) -> Path:
    """The library of compare.cpp at a level."""
    path = folder / f"{level}.so"
    command = [*native.compiler(), "-std=c++20", "-O2", "-fPIC", "-shared", "-w", *isa.flags_of(level)]
    subprocess.run([*command, str(SOURCE), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def amx(folder: Path) -> ctypes.CDLL:
    """The model of all there is."""
    return ctypes.CDLL(str(built("amx_model", folder)))


class Memory:
    """Bytes that begin with a cache line."""

    def __init__(self, size: int) -> None:
        self._whole = ctypes.create_string_buffer(size + 64)
        self._at = -ctypes.addressof(self._whole) % 64
        self.size = size
        self.pointer = ctypes.c_void_p(ctypes.addressof(self._whole) + self._at)

    def read(self) -> bytes:
        return self._whole.raw[self._at : self._at + self.size]

    def write(self, content: bytes) -> "Memory":
        ctypes.memmove(self.pointer, content, self.size)
        return self


# --- every intrinsic against the processor


def _moderate(draw: random.Random) -> bytes:
    return struct.pack("<f", draw.choice((-1, 1)) * 2.0 ** draw.uniform(-20, 20))


def _special(draw: random.Random) -> bytes:
    """Zeros, infinities, NaN, what is below normal numbers, halves between whole numbers, ends of ranges."""
    words = (
        0x00000000, 0x7F800000, 0x7FC00000, 0x7F812345, 0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF,
        0x3F000000, 0x3FC00000, 0x40200000, 0x4F000000, 0x4EFFFFFF, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001,
        0x7F7F8000, 0x43000000, 0xC2FC0000, 0x477FF000, 0x33000000, 0x00010000, 0x00800080, 0x0C000C00,
    )  # fmt: skip
    return struct.pack("<I", draw.choice(words) ^ draw.choice((0, 0x80000000)))


def _small_number(draw: random.Random) -> bytes:
    return struct.pack("<i", draw.randrange(-300, 300))


_WORDS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda draw: draw.randbytes(4), _moderate, _special, _small_number,
)  # fmt: skip


def _operands(draw: random.Random) -> bytes:
    """4 x 64 bytes, each operand of one kind or of all."""
    kinds = [draw.choice((*((word,) for word in _WORDS), _WORDS)) for _ in range(4)]
    return b"".join(draw.choice(kind)(draw) for kind in kinds for _ in range(16))


def _floats_are_equal(got: bytes, want: bytes) -> bool:
    """Bit by bit, but for NaN, which may be any."""
    words = zip(struct.unpack("<16f", got), struct.unpack("<16f", want), strict=True)
    pairs = zip(words, struct.unpack("<16I", got), struct.unpack("<16I", want), strict=True)
    return all(a == b or (x != x and y != y) for (x, y), a, b in pairs)


_OF_FLOATS = ("fmadd_ps", "max_ps", "roundscale_ps", "reduce_ps", "scalef_ps", "dpbf16_ps")


@pytest.mark.parametrize("level", ["avx512", "avx512_bf16"])
def test_the_model_computes_what_the_processor_does(level: str, folder: Path) -> None:
    if lacking := isa.missing(level):
        pytest.skip(f"this CPU lacks {', '.join(lacking)}")
    model, processor = (ctypes.CDLL(str(built(name, folder))) for name in (f"{level}_model", level))
    model.case_name.restype = ctypes.c_char_p
    names = [model.case_name(i).decode() for i in range(model.case_count())]
    assert len(names) == processor.case_count() > 50
    draw = random.Random(0)
    wrong: dict[str, str] = {}
    results = Memory(128), Memory(128)
    for _ in range(ROUNDS):
        content = _operands(draw)
        operands = Memory(256).write(content)
        for i, name in enumerate(names):
            for library, result in zip((model, processor), results, strict=True):
                result.write(bytes(128))
                library.run_case(i, operands.pointer, result.pointer)
            got, want = (result.read() for result in results)
            same = _floats_are_equal(got[:64], want[:64]) if name in _OF_FLOATS else got == want
            if not same:
                wrong.setdefault(
                    name, f"of {content.hex(' ', 4)}: {got.hex(' ', 4)} and not {want.hex(' ', 4)}"
                )
    assert not wrong, "\n".join(f"{name} {text}" for name, text in wrong.items())


def test_every_modelled_intrinsic_is_compared() -> None:
    headers = "".join(path.read_text() for path in (native.SOURCES / "model").glob("*.h"))
    names = set(
        re.findall(r"^(?:__attribute__.* )?inline \w+ _(?:mm512|tile)_(\w+)\(", headers, re.MULTILINE)
    )
    compared = SOURCE.read_text()
    assert len(names) > 60
    assert {name for name in names if not re.search(rf"(mm512|tile)_{name}\(", compared)} == set()


def test_the_model_leaves_the_arithmetic_of_the_process(amx: ctypes.CDLL) -> None:
    """The instructions of bfloat16 flush to zero, and numbers of others below the normal ones stay."""
    number = torch.tensor([1e-40])
    amx.case_name.restype = ctypes.c_char_p
    which = next(i for i in range(amx.case_count()) if amx.case_name(i) == b"dpbf16_ps")
    amx.run_case(which, Memory(256).write(bytes(256)).pointer, Memory(128).pointer)
    assert (number * 0.5).item() != 0


# --- tiles against the manual's definition, in exact arithmetic


def flushed(x: Fraction | float) -> Fraction:
    """To the nearest float32, halves to even; below the normal numbers it is zero."""
    x = Fraction(x)
    if x == 0:
        return x
    exponent = (abs(x).numerator.bit_length() - abs(x).denominator.bit_length()) - 1
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(x / unit) * unit
    return rounded if abs(rounded) >= NORMAL else Fraction(0)


def bfloat16s(count: int, seed: int, tiny: bool) -> torch.Tensor:
    """Normal numbers, some of them near the smallest or below it."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=draw)
    if tiny:
        x = x * 2.0 ** torch.randint(-70, -55, (count,), generator=draw)
        x[::5] *= 2.0**-70
    return x.bfloat16()


def by_the_manual(left: torch.Tensor, right: torch.Tensor, sums: torch.Tensor) -> list[list[Fraction]]:
    """TDPBF16PS: products of even places and of odd ones are summed apart, then both, then the tile's number."""
    numbers = [
        [flushed(Fraction(x)) if abs(x) >= NORMAL else Fraction(0) for x in row]
        for row in left.double().tolist()
    ]
    others = [
        [Fraction(x) if abs(x) >= NORMAL else Fraction(0) for x in row] for row in right.double().tolist()
    ]
    result = []
    for m, row in enumerate(numbers):
        result.append([])
        for n in range(sums.shape[1]):
            halves = [Fraction(0), Fraction(0)]
            for k, x in enumerate(row):
                halves[k % 2] = flushed(halves[k % 2] + x * others[k][n])
            result[m].append(flushed(flushed(sums[m, n].item()) + flushed(halves[0] + halves[1])))
    return result


def multiply(library: ctypes.CDLL, kind: int, rows: int, columns: int, words: int, *content: bytes) -> bytes:
    left, right, out = (Memory(len(one)).write(one) for one in content)
    library.multiply_tiles(kind, rows, columns, words, left.pointer, right.pointer, out.pointer)
    return out.read()


def interleaved(right: torch.Tensor, group: int) -> torch.Tensor:
    """[k, n] as an instruction wants it: [k / group, n, group]."""
    return right.unflatten(0, (-1, group)).transpose(1, 2).contiguous()


def content(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist())


SHAPES = [(16, 16, 16), (1, 1, 1), (3, 5, 7), (16, 2, 16), (2, 16, 9)]


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize(("rows", "columns", "words"), SHAPES)
def test_bfloat16_tiles(rows: int, columns: int, words: int, tiny: bool, amx: ctypes.CDLL) -> None:
    left = bfloat16s(rows * 2 * words, 1, tiny).view(rows, 2 * words)
    right = bfloat16s(2 * words * columns, 2, tiny).view(2 * words, columns)
    sums = bfloat16s(rows * columns, 3, False).view(rows, columns).float() * (2.0**-126 if tiny else 1)
    given = (content(left), content(interleaved(right, 2)), content(sums))
    got = struct.unpack(f"<{rows * columns}f", multiply(amx, 0, rows, columns, words, *given))
    want = by_the_manual(left, right, sums)
    assert [Fraction(x) for x in got] == [x for row in want for x in row]


_BYTES = {
    1: (torch.int8, torch.int8),
    2: (torch.int8, torch.uint8),
    3: (torch.uint8, torch.int8),
    4: (torch.uint8,) * 2,
}


@pytest.mark.parametrize("kind", _BYTES, ids=["ss", "su", "us", "uu"])
@pytest.mark.parametrize(("rows", "columns", "words"), SHAPES)
def test_int8_tiles(rows: int, columns: int, words: int, kind: int, amx: ctypes.CDLL) -> None:
    draw = torch.Generator().manual_seed(kind)
    shapes = ((rows, 4 * words), (4 * words, columns))
    left, right = (
        torch.randint(0, 256, shape, generator=draw).to(torch.uint8).view(dtype)
        for shape, dtype in zip(shapes, _BYTES[kind], strict=True)
    )
    sums = torch.randint(-(2**31), 2**31, (rows, columns), generator=draw).int()  # so that some go round
    got = multiply(
        amx, kind, rows, columns, words, content(left), content(interleaved(right, 4)), content(sums)
    )
    want = (sums.long() + left.long() @ right.long() + 2**31) % 2**32 - 2**31
    assert list(struct.unpack(f"<{rows * columns}i", got)) == want.flatten().tolist()


def test_zero_tiles_and_what_lies_between_rows_stays(amx: ctypes.CDLL) -> None:
    nothing = multiply(amx, 5, 3, 5, 7, bytes(3 * 28), bytes(7 * 20), b"\1" * 60)
    assert nothing == bytes(60)


_FAULTS: dict[str, tuple[str, str]] = {
    "no configuration": ("library.zero(0)", "no configuration is loaded"),
    "17 rows": ("configure(1, [64], [17])", "at most 16 rows of 64 bytes"),
    "65 bytes": ("configure(1, [65], [16])", "at most 16 rows of 64 bytes"),
    "9 tiles": ("configure(1, [64] * 9, [16] * 9)", "there are 8 tiles"),
    "palette": ("configure(2, [64], [16])", "palette 1"),
    "not configured": ("configure(1, [64], [16]); library.zero(1)", "the tile is not configured"),
    "same tile": ("configure(1, [64] * 3, [16] * 3); library.multiply(0, 1, 1)", "three different tiles"),
    "shapes": ("configure(1, [64] * 3, [16, 16, 15]); library.multiply(0, 1, 2)", "do not fit each other"),
    "words": ("configure(1, [62] * 3, [16] * 3); library.multiply(0, 1, 2)", "no whole number of words"),
    "none": ("configure(1, [64] * 3, [16] * 3); library.multiply(0, 1, 2); configure(0, [], [])", ""),
}


@pytest.mark.parametrize(("code", "said"), _FAULTS.values(), ids=_FAULTS)
def test_what_the_processor_refuses_ends_the_process(
    code: str, said: str, folder: Path, amx: ctypes.CDLL
) -> None:
    script = f"""
import ctypes, struct
library = ctypes.CDLL({str(folder / "amx_model.so")!r})
def configure(palette, widths, rows):
    widths, rows = (list(given) + [0] * (16 - len(given)) for given in (widths, rows))
    library.load_configuration(struct.pack("<BB14x16H16B", palette, 0, *widths, *rows))
{code}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(said), done.stderr
    assert said in done.stderr


@pytest.fixture(scope="module")
def processor(folder: Path) -> Iterator[ctypes.CDLL]:
    if lacking := isa.missing("amx"):
        pytest.skip(f"this CPU lacks {', '.join(lacking)}")
    library = ctypes.CDLL(str(built("amx", folder)))
    if not library.tiles_granted():
        pytest.skip("the kernel does not grant tile registers")
    yield library


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize(("rows", "columns", "words"), SHAPES)
def test_tiles_are_those_of_the_processor(
    rows: int, columns: int, words: int, kind: int, amx: ctypes.CDLL, processor: ctypes.CDLL
) -> None:
    draw = random.Random(kind)
    for i in range(50):
        words_of = _WORDS[i % len(_WORDS)]
        given = [
            b"".join(words_of(draw) for _ in range(count))
            for count in (rows * words, words * columns, rows * columns)
        ]
        got, want = (multiply(library, kind, rows, columns, words, *given) for library in (amx, processor))
        pad = bytes(-len(got) % 64)
        chunks = [(got + pad)[at : at + 64] for at in range(0, len(got), 64)]
        others = [(want + pad)[at : at + 64] for at in range(0, len(want), 64)]
        if kind == 0:
            assert all(map(_floats_are_equal, chunks, others))
        else:
            assert got == want
