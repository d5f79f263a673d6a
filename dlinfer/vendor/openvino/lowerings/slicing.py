"""Parts of a tensor: slices, splits, windows, triangles; also padding."""

from collections.abc import Sequence
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings import integers
from dlinfer.vendor.openvino.lowerings.creation import iota
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.registry import Build, Call, lowers, unless

aten = torch.ops.aten
I64 = ov.Type.i64
FURTHEST = 2**31 - 1
"""An ``end`` after every element of any dimension. The CPU plugin keeps 32 bits of a slice's ends."""


def position(b: Builder, value: Any) -> Output:
    if isinstance(value, int):
        return b.axes([max(-FURTHEST, min(value, FURTHEST))])
    return b.single(value)


def cut(b: Builder, x: Output, dim: int, start: Any, end: Any, step: Any = 1) -> Output:
    """Return x[start:end:step] along one dimension; negative bounds count from the end."""
    axis = b.axes([dim % rank(x)])
    return op.slice(x, position(b, start), position(b, end), b.single(step), axis).output(0)


def halves(b: Builder, x: Output, dim: int = -1) -> list[Output]:
    return list(op.split(x, b.scalar(dim % rank(x), I64), 2).outputs())


@lowers(aten.slice.Tensor)
def slice_(b: Builder, x: Output, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Output:
    first, last = 0 if start is None else start, FURTHEST if end is None else end
    if first == 0 and isinstance(last, int) and last >= FURTHEST and step == 1:
        return x
    return cut(b, x, dim, first, last, step)


@lowers(aten.narrow.default)
def narrow(b: Builder, x: Output, dim: int, start: Any, length: Any) -> Output:
    if isinstance(start, int) and start < 0:
        start = op.add(b.cast(b.size(x, dim), I64), b.scalar(start, I64)).output(0)
    if isinstance(start, int) and isinstance(length, int):
        return cut(b, x, dim, start, start + length)
    end = op.add(b.cast(start, I64), b.cast(length, I64)).output(0)
    return cut(b, x, dim, start, end)


_fixed_order = unless(
    lambda call: isinstance(call.arguments["n"], int), "the order of the differences is not fixed"
)


@lowers(aten.diff.default, refuses=_fixed_order)
def diff(b: Builder, x: Output, n: int = 1, dim: int = -1, *ends: Output | None) -> Output:
    """Return differences of neighbours, n times.

    ends: torch's ``prepend`` and ``append``: tensors, or None, that are put before and after x first.
    """
    before, after = ends or (None, None)
    kind = integers.computed_in(b.kind)
    parts = [b.cast(part, kind) for part in (before, x, after) if part is not None]
    result = parts[0] if len(parts) == 1 else op.concat(parts, dim % rank(x)).output(0)
    subtract = op.logical_xor if kind == ov.Type.boolean else op.subtract
    for _ in range(n):
        result = subtract(cut(b, result, dim, 1, FURTHEST), cut(b, result, dim, 0, -1)).output(0)
    return b.cast(result, b.kind)


@lowers(aten.select.int)
def select(b: Builder, x: Output, dim: int, index: Any) -> Output:
    place = b.cast(index, I64)
    return op.gather(x, place, b.scalar(dim % rank(x), I64)).output(0)


@lowers(aten.unbind.int)
def unbind(b: Builder, x: Output, dim: int = 0) -> list[Output]:
    return [select(b, x, dim, index) for index in range(len(b.call.result))]


def _parts(b: Builder, x: Output, dim: int, lengths: Sequence[Any]) -> list[Output]:
    """Split x into parts of these lengths, whose sum is the size of the dimension."""
    if len(lengths) == 1:
        return [x]
    sizes = b.numbers(lengths)
    return list(op.variadic_split(x, b.scalar(dim % rank(x), I64), sizes).outputs())


lowers(aten.split_with_sizes.default, aten.split.sizes)(lambda b, x, sizes, dim=0: _parts(b, x, dim, sizes))


@lowers(aten.split.Tensor, aten.chunk.default, aten.unsafe_chunk.default, aten.tensor_split.sections)
def split(b: Builder, x: Output, how: Any, dim: int = 0) -> list[Output]:
    """Split x into as many parts as the captured call returns.

    how: for aten.split the length of each part but the last, for the other ops the number of parts.

    If the lengths vary between calls, the model computes them as torch does. With tensor_split they differ by at most
    one, and the longer parts come first. With the other ops all parts but the last are equally long."""
    lengths = [fixed_size(part.shape[dim]) for part in b.call.result]
    if None not in lengths:
        return _parts(b, x, dim, lengths)
    number = len(b.call.result)
    if number == 1:
        return [x]
    if b.call.target is aten.split.Tensor:
        long = b.cast(how, I64)
    elif b.call.target is aten.tensor_split.sections:
        whole = b.cast(b.size(x, dim), I64)
        short = op.divide(whole, b.scalar(number, I64)).output(0)
        longer = op.subtract(whole, op.multiply(short, b.scalar(number, I64))).output(0)
        places = (b.scalar(index, I64) for index in range(number))
        starts = [op.add(op.multiply(short, nth), op.minimum(longer, nth)).output(0) for nth in places]
        return _between(b, x, dim, starts)
    else:
        whole = op.add(b.cast(b.size(x, dim), I64), b.scalar(number - 1, I64))
        long = op.divide(whole, b.scalar(number, I64)).output(0)
    return _between(b, x, dim, [op.multiply(long, b.scalar(index, I64)).output(0) for index in range(number)])


def _between(b: Builder, x: Output, dim: int, starts: Sequence[Output]) -> list[Output]:
    return [cut(b, x, dim, start, end) for start, end in zip(starts, (*starts[1:], FURTHEST), strict=True)]


def _known_pad(call: Call) -> str | None:
    mode = call.arguments["mode"]
    return None if mode in _MODES else f"it pads with mode {mode}"


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


@lowers(aten.pad.default, refuses=_known_pad)
def pad(b: Builder, x: Output, widths: list[Any], mode: str = "constant", value: Any = None) -> Output:
    # Widths start with the last dimension.
    untouched = [0] * (rank(x) - len(widths) // 2)
    before, after = (untouched + widths[side::2][::-1] for side in (0, 1))
    filler = b.cast(0 if value is None else value, x.get_element_type())
    return op.pad(x, b.numbers(before), b.numbers(after), _MODES[mode], filler).output(0)


lowers(aten.constant_pad_nd.default)(lambda b, x, widths, value=0: pad(b, x, widths, "constant", value))


def _triangle(lower: bool) -> Build:
    def build(b: Builder, x: Output, diagonal: Any = 0) -> Output:
        rows, columns = (iota(b, b.size(x, dim)) for dim in (-2, -1))
        off = op.subtract(op.unsqueeze(columns, b.axes([0])), op.unsqueeze(rows, b.axes([1])))
        edge = b.cast(diagonal, I64)
        kept = (op.less_equal if lower else op.greater_equal)(off, edge)
        return b.select(kept.output(0), x, 0, x.get_element_type())

    return build


lowers(aten.tril.default)(_triangle(True))
lowers(aten.triu.default)(_triangle(False))


_fixed_window = unless(
    lambda call: all(isinstance(call.fake(name), int) for name in ("size", "step")),
    "the size or step of the windows is not fixed",
)


@lowers(aten.unfold.default, refuses=_fixed_window)
def unfold(b: Builder, x: Output, dimension: int, size: int, step: int) -> Output:
    """Return windows along one dimension, with their elements in a new last dimension."""
    place = dimension % rank(x)
    length = b.cast(b.size(x, place), I64)
    last = op.subtract(length, b.scalar(size - 1, I64))
    starts = iota(b, last.output(0), 0, step)
    places = op.add(op.unsqueeze(starts, b.axes([1])), b.axes(list(range(size))))
    windows = op.gather(x, places, b.scalar(place, I64)).output(0)
    order = [dim for dim in range(rank(x) + 1) if dim != place + 1] + [place + 1]
    return op.transpose(windows, b.axes(order)).output(0)


@lowers(aten.diagonal.default)
def diagonal(b: Builder, x: Output, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Output:
    """Return a diagonal: flatten the two dimensions into one, and gather the diagonal's elements from it."""
    first, other = dim1 % rank(x), dim2 % rank(x)
    order = [dim for dim in range(rank(x)) if dim not in (first, other)] + [first, other]
    moved = op.transpose(x, b.axes(order)).output(0)
    rows, columns = b.cast(b.size(x, first), I64), b.cast(b.size(x, other), I64)
    first = max(-offset, 0), max(offset, 0)
    left = op.minimum(
        op.subtract(rows, b.scalar(first[0], I64)), op.subtract(columns, b.scalar(first[1], I64))
    )
    number = op.maximum(left, b.scalar(0, I64))
    places = iota(b, number.output(0))
    flat = op.add(
        op.multiply(op.add(places, b.scalar(first[0], I64)), columns), op.add(places, b.scalar(first[1], I64))
    )
    sizes = [b.size(moved, dim) for dim in range(rank(x) - 2)]
    joined = op.multiply(rows, columns).output(0)
    lines = op.reshape(moved, b.numbers([*sizes, joined]), False)
    return op.gather(lines, flat, b.scalar(rank(x) - 2, I64)).output(0)
