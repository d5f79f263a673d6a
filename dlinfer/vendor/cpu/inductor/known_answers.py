"""What the C++ kernels and compiled loops of this vendor are asked before they are trusted.

Both are made by a compiler for the CPU at hand, so that another CPU runs other instructions.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.known_answers.answer import KnownAnswer, NotTakenError, name_of
from dlinfer.graph.known_answers.questions import FLOATS, ROUNDED, small_whole, special
from dlinfer.graph.known_answers.suite import KnownAnswers
from dlinfer.graph.seam import fake_mode
from dlinfer.graph.seam.inductor import compile_loops
from dlinfer.graph.seam.symbols import fake_of_any_length
from dlinfer.ops.packing import AWQ
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor.fusible import decompositions
from dlinfer.vendor.cpu.inductor.twins import twins_of

CLUSTERS, EVERY_DTYPE = "clusters", "every dtype"
"""The kind and the precision under which compiled loops are asked for: all of them at once, since one compilation takes
seconds."""

ROWS = (1, 2, 7, 40, 65, 130)
"""On both sides of each number of rows at which another kernel begins."""


def known_answers() -> KnownAnswers:
    """The known answers of the vendor's own code."""
    version = torch.__version__.partition("+")[0]
    return KnownAnswers(lambda: f"torch {version} with dlinfer's C++ kernels", answers, native.library_name)


def answers() -> Iterator[KnownAnswer]:
    """All that is asked."""
    for dtype in FLOATS:
        for bias in (False, True):
            yield _linear(dtype, bias)
        yield _packed_linear(dtype)
        if dtype != torch.float32:
            yield _norm(dtype)
    yield KnownAnswer(
        "compiled loops with NaN and infinities", frozenset({CLUSTERS}), EVERY_DTYPE, _loops, _by_python
    )


def _native(name: str) -> Callable[..., Tensor]:
    if (reason := native.why_not()) is not None:
        raise NotTakenError(f"the C++ kernels cannot be built: {reason}")
    return getattr(torch.ops.dlinfer_cpu, name).default


# --- kernels in C++


def _linear(dtype: torch.dtype, biased: bool) -> KnownAnswer:
    """Sums of at most 200 products of -1, 0 and 1: exact in every dtype, in any order."""
    weights = [small_whole(70, 200, 1), small_whole(33, 200, 2)]
    bias = small_whole(1, 70, 3)[0] if biased else None
    inputs = [small_whole(rows, 200, rows) for rows in ROWS]

    def run() -> Sequence[Tensor]:
        linear, linears = _native("linear"), _native("linears")
        given = None if bias is None else bias.to(dtype)
        narrow = [weight.to(dtype) for weight in weights]
        results = [linear(x.to(dtype), narrow[0], given) for x in inputs]
        return results + [one for x in inputs for one in linears(x.to(dtype), narrow, [given, None])]

    def expected() -> Sequence[Tensor]:
        results = [F.linear(x, weights[0], bias) for x in inputs]
        results += [one for x in inputs for one in (F.linear(x, weights[0], bias), F.linear(x, weights[1]))]
        return [one.to(dtype) for one in results]

    name = f"C++ linear of {', '.join(map(str, ROWS))} rows{', with bias' if biased else ''}"
    return KnownAnswer(name, frozenset({"native linear", "native linears"}), name_of(dtype), run, expected)


def _packed_linear(dtype: torch.dtype) -> KnownAnswer:
    """Sums of at most 200 products of -1, 0 and 1 with numbers of -15 to 15: exact in float32, in any order."""
    packing = AWQ.of_groups(48)
    numbers, zeros = small_whole(200, 136, 1) * 7 + 8, small_whole(5, 136, 2) * 7 + 8
    qweight, qzeros = packing.pack(numbers.long()), packing.pack_zeros(zeros.long())
    scales, inputs = 2.0 ** small_whole(5, 136, 3), [small_whole(rows, 200, rows) for rows in ROWS]

    def run() -> Sequence[Tensor]:
        product = _native("weight_quant_matmul")
        return [product(x.to(dtype), qweight, scales.half(), qzeros, None, 48) for x in inputs]

    def expected() -> Sequence[Tensor]:
        weight = packing.dequantise(qweight, scales, qzeros)
        return [(x @ weight).to(dtype) for x in inputs]

    name = f"C++ linear with a weight of 4 bits, of {', '.join(map(str, ROWS))} rows"
    return KnownAnswer(name, frozenset({"native weight_quant_matmul"}), name_of(dtype), run, expected)


def _norm(dtype: torch.dtype) -> KnownAnswer:
    x, residual = (small_whole(5, 203, shift).add(0.5).to(dtype) for shift in (1, 2))
    weight = small_whole(1, 203, 3)[0].add(2).to(dtype)

    def run() -> Sequence[Tensor]:
        return [
            _native("rms_norm")(x, weight, 1e-6),
            *_native("add_rms_norm")(x, residual, weight, 1e-6),
        ]

    def expected() -> Sequence[Tensor]:
        total = x.double() + residual.double()
        values = [normed(x.double()), normed(total), total]
        return [one.to(dtype) for one in values]

    def normed(value: Tensor) -> Tensor:
        return value * (value.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()

    kinds = frozenset({"native rms_norm", "native add_rms_norm"})
    return KnownAnswer("C++ norms", kinds, name_of(dtype), run, expected, ROUNDED[dtype])


# --- compiled loops


def _loops() -> list[Tensor]:
    given = [one for dtype in FLOATS for one in special(dtype)]
    mode = fake_mode.fresh_mode()
    captured = trace(_looped, [fake_of_any_length(mode, one) for one in given], mode)
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    twins = twins_of([fake(node) for node in placeholders])
    graph = fake_mode.trace_decomposed(captured.graph_module, twins.values, twins.mode, decompositions())
    with native.memory_for_results():
        run = compile_loops(graph, twins.values, twins.mode)
    return list(run(*given))


def _looped(*given: Tensor) -> tuple[Tensor, ...]:
    pairs = zip(given[::2], given[1::2], strict=True)
    return tuple(pytree.tree_leaves([_of_two(x, y) for x, y in pairs]))


def _of_two(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return x > y, x <= y, torch.where(x < y, x, y), torch.maximum(x, y), y.amax(1), x * 2 + y


def _by_python() -> list[Tensor]:
    """The same by Python's floats, whose comparisons, products and sums are IEEE 754's."""
    found = []
    for dtype in FLOATS:
        x, y = special(dtype)
        pairs = list(zip(x.flatten().tolist(), y.flatten().tolist(), strict=True))
        found += [torch.tensor([a > b for a, b in pairs]).view(x.shape)]
        found += [torch.tensor([a <= b for a, b in pairs]).view(x.shape)]
        numbers = [
            [a if a < b else b for a, b in pairs],
            [a + b if a != a or b != b else max(a, b) for a, b in pairs],
        ]
        found += [torch.tensor(one, dtype=dtype).view(x.shape) for one in numbers]
        rows = [sum(row) if any(v != v for v in row) else max(row) for row in y.tolist()]
        found += [torch.tensor(rows, dtype=dtype)]
        found += [torch.tensor([a * 2 + b for a, b in pairs], dtype=dtype).view(x.shape)]
    return found
