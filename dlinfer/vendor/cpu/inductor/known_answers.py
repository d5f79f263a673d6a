"""What the C++ kernels and compiled loops of this vendor are asked before graphs trust them.

Both are made by a compiler for the CPU at hand, so that another CPU runs other instructions.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.selftest.answer import KnownAnswer
from dlinfer.graph.selftest.questions import FLOATS, special
from dlinfer.graph.selftest.suite import KnownAnswers
from dlinfer.graph.torch_private import fake_mode
from dlinfer.graph.torch_private.inductor import compile_loops
from dlinfer.graph.torch_private.symbols import fake_of_any_length
from dlinfer.vendor.cpu import kernel_answers, native
from dlinfer.vendor.cpu.inductor.fusible import decompositions
from dlinfer.vendor.cpu.inductor.twins import twins_of

CLUSTERS, EVERY_DTYPE = "clusters", "every dtype"
"""The kind and the precision under which compiled loops are asked for: all of them at once, since one compilation takes
seconds."""


def known_answers() -> KnownAnswers:
    """The known answers of the vendor's own code."""
    return KnownAnswers(kernel_answers.owner, answers, native.library_name)


def answers() -> Iterator[KnownAnswer]:
    """All that is asked."""
    yield from kernel_answers.answers()
    yield KnownAnswer(
        "compiled loops with NaN and infinities", frozenset({CLUSTERS}), EVERY_DTYPE, _loops, _by_python
    )


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
