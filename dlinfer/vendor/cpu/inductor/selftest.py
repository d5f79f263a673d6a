"""The self-test of this vendor's C++ kernels and compiled loops.

Both are compiled for the CPU at hand, so tests on another CPU do not show that they are right here.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.selftest.case import Case
from dlinfer.graph.selftest.suite import SelfTest
from dlinfer.graph.selftest.torch_cases import FLOATS, by_python, special
from dlinfer.graph.torch_private import fake_mode
from dlinfer.graph.torch_private.inductor import compile_loops
from dlinfer.graph.torch_private.symbols import fake_of_any_length
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor.fusible import decompositions
from dlinfer.vendor.cpu.inductor.twins import twins_of
from dlinfer.vendor.cpu.selftest import kernels as kernel_selftest

CLUSTERS, EVERY_DTYPE = "clusters", "every dtype"
"""Name and precision of the only case of compiled loops.

It has all dtypes at once, since each compilation takes seconds.
"""


def selftest() -> SelfTest:
    return SelfTest(kernel_selftest.owner, cases, native.library_name)


def cases() -> Iterator[Case]:
    yield from kernel_selftest.cases()
    yield Case("compiled loops with NaN and infinities", {CLUSTERS}, EVERY_DTYPE, _loops, _expected)


# --- compiled loops


def _loops() -> list[Tensor]:
    inputs = [tensor for dtype in FLOATS for tensor in special(dtype)]
    mode = fake_mode.fresh_mode()
    captured = trace(_looped, [fake_of_any_length(mode, tensor) for tensor in inputs], mode)
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    twins = twins_of([fake(node) for node in placeholders])
    graph = fake_mode.trace_decomposed(captured.graph_module, twins.values, twins.mode, decompositions())
    with native.memory_for_results():
        run = compile_loops(graph, twins.values, twins.mode)
    return list(run(*inputs))


def _looped(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(result for x, y in zip(inputs[::2], inputs[1::2], strict=True) for result in _of_two(x, y))


def _of_two(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return x > y, x <= y, torch.where(x < y, x, y), torch.maximum(x, y), y.amax(1), x * 2 + y


def _expected() -> list[Tensor]:
    """Return the expected results, computed with Python's floats, which follow IEEE 754."""
    by_pairs = by_python(
        lambda a, b: a > b,
        lambda a, b: a <= b,
        lambda a, b: a if a < b else b,
        lambda a, b: a + b if a != a or b != b else max(a, b),
        lambda a, b: a * 2 + b,
    )
    results: list[Tensor] = []
    for dtype in FLOATS:
        x, y = special(dtype)
        greater, less, smallest, largest, total = by_pairs(x, y)
        rows = [sum(row) if any(v != v for v in row) else max(row) for row in y.tolist()]
        numbers = smallest, largest, torch.tensor(rows, dtype=torch.float64), total
        results += [greater, less, *(tensor.to(dtype) for tensor in numbers)]
    return results
