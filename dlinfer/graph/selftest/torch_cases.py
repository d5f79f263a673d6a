"""Self-test cases for every graph engine: functions of torch with known results.

Expected results come from exact arithmetic (small integers, comparisons in Python) or from the same formula in float64.
Row lengths exceed the widest vector register and are no multiple of it. So a case tests both the vector loop and the
loop for the remainder.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.errors import GraphFallbackError
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.engine import Engine
from dlinfer.graph.lowering.lower import lower
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.collect import collecting
from dlinfer.graph.report.report import GraphReport
from dlinfer.graph.selftest.case import Case, NotSupportedError, dtype_name
from dlinfer.graph.torch_private.fake_mode import fresh_mode
from dlinfer.graph.torch_private.symbols import fake_of_any_length
from dlinfer.ops.core.oracle import widened

_Results = Tensor | Sequence[Tensor]
Function = (
    Callable[[Tensor], _Results]
    | Callable[[Tensor, Tensor], _Results]
    | Callable[[Tensor, Tensor, Tensor], _Results]
)
Inputs = Callable[[torch.dtype], Sequence[Tensor]]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Tolerances for elementary functions and for sums of a hundred reordered terms: a few units in the last place."""


@dataclass(frozen=True)
class TorchCase:
    """A function of torch and its expected results.

    covers: names of the tested ops, as ``case.packet_name`` returns them.
    inputs: takes a dtype and returns the function's inputs.
    reference: computes the expected results from the inputs in float64; if None, ``function`` itself computes them.
    tolerance: dtype -> tolerance. It is 0 for a dtype that is not listed.
    skip_reason: returns a reason not to run the case now, or None.
    """

    name: str
    covers: Sequence[str]
    function: Function
    inputs: Inputs
    reference: Function | None = None
    tolerance: Mapping[torch.dtype, float] | None = None
    skip_reason: Callable[[], str | None] = lambda: None

    def for_engine(self, engine: Engine, options: Mapping[str, object], dtype: torch.dtype) -> Case:
        """Return the case that runs ``function`` in an engine in one dtype. options: the engine's own options."""
        return Case(
            self.name,
            self.covers,
            dtype_name(dtype),
            lambda: _run_in_engine(engine, self.function, self.inputs(dtype), options),
            lambda: self.expected(dtype),
            (self.tolerance or {}).get(dtype, 0.0),
            self.skip_reason,
        )

    def expected(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the expected results: computed in float64, then rounded to ``dtype``."""
        results = pytree.tree_leaves((self.reference or self.function)(*widened(self.inputs(dtype))))
        return [result.to(dtype) if result.is_floating_point() else result for result in results]


def engine_cases(
    engine: Engine, options: Mapping[str, object], cases: Sequence[TorchCase], dtypes: Collection[torch.dtype]
) -> Iterator[Case]:
    """Yield each case for an engine in each dtype. options: the engine's own options."""
    return (case.for_engine(engine, options, dtype) for case in cases for dtype in dtypes)


def _run_in_engine(
    engine: Engine, function: Function, inputs: Sequence[Tensor], options: Mapping[str, object]
) -> list[Tensor]:
    """Run a function in a graph engine, on copies of ``inputs``, and return its results.

    The first size of each tensor is symbolic, as the number of tokens is in a user's graph.
    options: all of the engine's own options.
    Raises NotSupportedError if the engine refuses the function or the call.
    """
    mode = fresh_mode()
    fakes = [fake_of_any_length(mode, tensor) for tensor in inputs]

    def flat(*inputs: Tensor) -> tuple[object, ...]:
        return tuple(pytree.tree_leaves(function(*inputs)))

    captured = trace(flat, fakes, mode)
    chosen = CompileOptions(
        engine=engine.name, fallback="error", small_regions="engine", engine_options=options
    )
    try:
        with collecting(GraphReport("self-test", 0, engine.name)):
            compiled = lower(captured, engine, chosen)
        with torch.no_grad():
            return list(compiled(*(tensor.clone() for tensor in inputs)))
    except GraphFallbackError as refused:
        raise NotSupportedError(str(refused.fields["reason"])) from refused


# --- inputs


_SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, inf, -inf, nan, 0.5, -7.0, 300.0, -0.125]


def special(dtype: torch.dtype) -> list[Tensor]:
    """Return two tensors [12, 37] of special numbers, such as -0.0, inf and NaN.

    Each pair of a special number in the first tensor and one in the second tensor is at some index.
    """
    values = torch.tensor(_SPECIAL, dtype=dtype)
    columns = torch.arange(37) % len(values)
    shifted = (columns + torch.arange(len(values))[:, None]) % len(values)
    return [values[columns].expand(len(values), -1).contiguous(), values[shifted]]


def rows_with_special(dtype: torch.dtype) -> list[Tensor]:
    """Return a tensor [9, 37] of finite rows, and of rows with one or more special numbers at different places."""
    x = _spread(9, 37)
    x[1, 5] = nan
    x[2, 36] = inf
    x[3, 0], x[3, 20] = -inf, nan
    x[4] = -inf
    x[5, 7], x[5, 30] = inf, -inf
    x[6, ::2] = -inf
    x[7, 11], x[7, 12], x[7, 33] = nan, inf, nan
    return [x.to(dtype)]


def _spread(rows: int, columns: int, scale: float = 3.0) -> Tensor:
    """Return different, unordered numbers between -scale and scale, from fractions of multiples of the golden ratio."""
    count = torch.arange(1, rows * columns + 1, dtype=torch.float64)
    return ((count * 0.6180339887498949) % 1.0 * 2 - 1).mul(scale).view(rows, columns)


def spread(dtype: torch.dtype) -> list[Tensor]:
    return [_spread(7, 67).to(dtype)]


def positive(dtype: torch.dtype) -> list[Tensor]:
    """Return a tensor [7, 67] of positive numbers up to about 3."""
    return [_spread(7, 67).abs().add(0.01).to(dtype)]


def small_whole(rows: int, columns: int, shift: int) -> Tensor:
    """Return a matrix of -1, 0 and 1 in a pattern. Sums of up to 256 products are exact in every precision.

    shift: selects one of 11 patterns.
    """
    place = torch.arange(rows * columns).view(rows, columns)
    return ((place * 7 + place // columns * 5 + shift) % 11 % 3 - 1).double()


def _factors(rows: int) -> Inputs:
    return lambda dtype: [small_whole(rows, 131, 0).to(dtype), small_whole(70, 131, 4).to(dtype)]


def _whole(_: torch.dtype) -> list[Tensor]:
    x = torch.tensor(
        [7, -7, 0, 1, 2**24 + 1, -(2**24) - 3, 2**30 + 7, -(2**30) - 1, 100_000_007, -1, 12, 255]
    )
    y = torch.tensor([3, -3, 5, 2**24 + 3, 1, 7, 2, 10, 3, 9, -12, 16])
    return [x.repeat(4), y.repeat(4)]


# --- expected results by Python


def _rows(x: Tensor) -> list[list[float]]:
    return x.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - torch: a list


def by_python(*functions: Callable[[float, float], float]) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Return a function for ``TorchCase.reference``. It applies Python functions to each pair of elements of x and y.

    It returns one tensor for each of ``functions``.
    """

    def reference(x: Tensor, y: Tensor) -> list[Tensor]:
        pairs = list(zip(*(_rows(value.view(1, -1))[0] for value in (x, y)), strict=True))
        columns = [[function(a, b) for a, b in pairs] for function in functions]
        dtypes = [torch.float64 if isinstance(column[0], float) else None for column in columns]
        return [torch.tensor(c, dtype=dtype).view(x.shape) for c, dtype in zip(columns, dtypes, strict=True)]

    return reference


def _comparison(name: str, *aliases: str) -> TorchCase:
    compare = getattr(operator, name)
    return TorchCase(
        f"{name} of NaN and infinities",
        [f"aten.{name}", *aliases],
        lambda x, y: (compare(x, y), compare(x, 0.5), compare(x, inf)),
        special,
        by_python(compare, lambda a, _: compare(a, 0.5), lambda a, _: compare(a, inf)),
    )


def _nan_or(choose: Callable[..., float], *numbers: float) -> float:
    return nan if any(number != number for number in numbers) else choose(*numbers)


def _row_extremes_by_python(x: Tensor) -> list[Tensor]:
    def extreme(row: list[float], sign: int) -> tuple[int, float]:
        """Return index and value of the first NaN; without NaN, of the first maximum (sign 1) or minimum (sign -1)."""
        return max(enumerate(row), key=lambda v: (v[1] != v[1], 0.0 if v[1] != v[1] else sign * v[1], -v[0]))

    extremes = [[extreme(row, sign) for row in _rows(x)] for sign in (1, -1)]
    high, low = (torch.tensor([value for _, value in rows], dtype=torch.float64) for rows in extremes)
    argmax, argmin = (torch.tensor([place for place, _ in rows]) for rows in extremes)
    return [high, argmax, low, argmin, argmax, argmin, high, low]


def _row_extremes(x: Tensor) -> Sequence[Tensor]:
    return *x.max(1), *x.min(1), x.argmax(1), x.argmin(1), x.amax(1), x.amin(1)


def _softmax_in_float64(x: Tensor) -> list[Tensor]:
    """Return softmax and log_softmax of each row. They are NaN in a row with NaN or inf, and in a row of -inf only."""
    exps = (x - x.max(1, keepdim=True)[0]).exp()
    shares = exps / exps.sum(1, keepdim=True)
    logs = x - x.max(1, keepdim=True)[0] - exps.sum(1, keepdim=True).log()
    none = (x.isnan() | (x == inf)).any(1, keepdim=True) | (x == -inf).all(1, keepdim=True)
    return [shares.masked_fill(none, nan), logs.masked_fill(none, nan)]


def _logsumexp_by_python(x: Tensor) -> Tensor:
    def summed(row: list[float]) -> float:
        high = _nan_or(max, *row)
        return high + math.log(sum(math.exp(v - high) for v in row)) if math.isfinite(high) else high

    return torch.tensor([summed(row) for row in _rows(x)], dtype=torch.float64)


def _sorted_by_python(x: Tensor, count: int) -> list[Tensor]:
    """Return the ``count`` largest and the ``count`` smallest numbers of each row, sorted. NaN is above all numbers."""
    rows = [sorted(row, key=lambda v: (v != v, 0.0 if v != v else v)) for row in _rows(x)]
    best = [row[::-1][:count] for row in rows], [row[:count] for row in rows]
    return [torch.tensor(part, dtype=torch.float64) for part in best]


def _whole_function(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return x + y, (x % 1000) * y, x // y, x % y, x < y, x == y, torch.maximum(x, y)


def _heads(dtype: torch.dtype) -> list[Tensor]:
    q, k, v = (
        _spread(2 * count, 19 * 64, 1.5).roll(shift).view(2, count, 19, 64)
        for count, shift in ((4, 0), (4, 5), (4, 11))
    )
    return [q.to(dtype), k.to(dtype), v.to(dtype)]


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention from its formula, written out so that no library replaces it by its own attention."""
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -inf)
    exps = (scores - scores.amax(-1, keepdim=True)).exp()
    return ((exps / exps.sum(-1, keepdim=True))[..., None] * v[..., None, :, :]).sum(-2)


def _elementary(names: str, inputs: Inputs) -> Iterator[TorchCase]:
    """Yield a case for each elementary function, on finite numbers. names: the functions, separated by spaces."""
    for name in names.split():
        yield TorchCase(name, [f"aten.{name}"], getattr(torch, name), inputs, tolerance=ROUNDED)


TORCH_CASES: list[TorchCase] = [
    *map(_comparison, ("eq", "le", "ge")),
    _comparison("ne", "aten.not_equal"), _comparison("lt", "aten.less"), _comparison("gt", "aten.greater"),
    TorchCase("where and masked_fill with NaN and infinities", ["aten.where", "aten.masked_fill"],
             lambda x, y: (torch.where(x > y, x, y), x.masked_fill(y < 0, -inf), torch.where(x != x, 0.5, y)), special,
             by_python(lambda a, b: a if a > b else b, lambda a, b: -inf if b < 0 else a,
                       lambda a, b: 0.5 if a != a else b)),
    TorchCase("maximum, minimum and clamp of NaN",
             ["aten.maximum", "aten.minimum", "aten.clamp", "aten.clip", "aten.clamp_min", "aten.clamp_max"],
             lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), x.clamp(-1.0, 2.0), x.clamp(min=0.5)), special,
             by_python(lambda a, b: _nan_or(max, a, b), lambda a, b: _nan_or(min, a, b),
                       lambda a, _: a if a != a else min(max(a, -1.0), 2.0),
                       lambda a, _: a if a != a else max(a, 0.5))),
    TorchCase("relu of NaN and infinities", ["aten.relu"], lambda x, y: torch.relu(y), special,
             lambda x, y: torch.where(y < 0, 0.0, y)),
    TorchCase("isnan, isinf and isfinite", ["aten.isnan", "aten.isinf", "aten.isfinite"],
             lambda x, y: (y.isnan(), y.isinf(), y.isfinite()), special,
             by_python(lambda _, b: math.isnan(b), lambda _, b: math.isinf(b), lambda _, b: math.isfinite(b))),
    TorchCase("largest and smallest of rows with NaN",
             ["aten.max", "aten.min", "aten.argmax", "aten.argmin", "aten.amax", "aten.amin", "aten.aminmax"],
             _row_extremes, rows_with_special, _row_extremes_by_python),
    TorchCase("softmax and log_softmax of rows with NaN and infinities",
             ["aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax"],
             lambda x: (x.softmax(1), x.log_softmax(1)), rows_with_special, _softmax_in_float64, ROUNDED),
    TorchCase("logsumexp of rows with NaN and infinities", ["aten.logsumexp"], lambda x: x.logsumexp(1),
             rows_with_special, _logsumexp_by_python, ROUNDED),
    TorchCase("any and all", ["aten.any", "aten.all"], lambda x: ((x > 0.5).any(1), (x > -2.9).all(1)), spread,
             lambda x: [torch.tensor([f(v > c for v in row) for row in _rows(x)])
                        for f, c in ((any, 0.5), (all, -2.9))]),
    TorchCase("topk and sort of rows with NaN", ["aten.topk", "aten.sort", "aten.argsort"],
             lambda x: (*x.topk(5, 1)[:1], *x.topk(5, 1, largest=False)[:1]), rows_with_special,
             lambda x: _sorted_by_python(x, 5)),
    TorchCase("arithmetic of two tensors", ["aten.add", "aten.sub", "aten.mul", "aten.div"],
             lambda x: (x + x.flip(1), x - x.flip(1), x * x.flip(1), x / (x.flip(1) + 4)), spread,
             tolerance=ROUNDED),
    TorchCase("sum and mean of rows", ["aten.sum", "aten.mean"], lambda x: (x.sum(1), x.mean(1), x.sum(0)), spread,
             tolerance={dtype: 4 * bound for dtype, bound in ROUNDED.items()}),
    TorchCase("arithmetic of whole numbers above 2**24",
             ["aten.floor_divide", "aten.remainder"], _whole_function, _whole,
             by_python(lambda a, b: a + b, lambda a, b: (a % 1000) * b, lambda a, b: a // b, lambda a, b: a % b,
                       lambda a, b: a < b, lambda a, b: a == b, max)),
    TorchCase("linear of few rows", ["aten.linear", "dlinfer.linear", "dlinfer.linears", "aten.mm", "aten.addmm"],
             F.linear, _factors(5)),
    TorchCase("linear of many rows", ["aten.linear", "dlinfer.linear", "dlinfer.linears", "aten.mm", "aten.addmm"],
             F.linear, _factors(40)),
    TorchCase("product of matrices", ["aten.matmul", "aten.mm", "aten.bmm"],
             lambda x, y: x @ y.t(), _factors(40)),
    TorchCase("gelu, silu and tanh", ["aten.gelu", "aten.silu", "aten.tanh", "aten.sigmoid"],
             lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), torch.tanh(x), torch.sigmoid(x)),
             spread, tolerance=ROUNDED),
    TorchCase("layer_norm", ["aten.layer_norm"], lambda x: F.layer_norm(x, (67,)), spread, tolerance=ROUNDED),
    TorchCase("rms_norm", ["dlinfer.rms_norm", "dlinfer.add_rms_norm"],
             lambda x, w: torch.ops.dlinfer.rms_norm(x, w, 1e-6),
             lambda dtype: [*spread(dtype), _spread(1, 67)[0].to(dtype)],
             lambda x, w: x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * w, ROUNDED),
    TorchCase("rows of a table", ["aten.embedding", "aten.index_select"],
             lambda t, i: (F.embedding(i, t), t.index_select(0, i)),
             lambda dtype: [_spread(9, 67).to(dtype), torch.tensor([8, 0, 3, 3, 5])],
             lambda t, i: [torch.stack([t[int(k)] for k in i])] * 2),
    TorchCase("scaled_dot_product_attention, causal", ["aten.scaled_dot_product_attention"],
             lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), _heads, _attended, ROUNDED),
    *_elementary("exp sin cos erf", spread), *_elementary("log sqrt rsqrt", positive),
]  # fmt: skip
