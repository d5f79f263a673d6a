"""Lowering small functions for OpenVINO without Dynamo, and comparing them with eager at several sizes."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from dlinfer.graph.capture.trace import trace
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.lowering.lower import lower
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report.collect import collecting
from dlinfer.graph.report.report import GraphReport
from dlinfer.vendor.openvino.engine import OpenVINOEngine
from tests.graph.symbols import symbolic

ENGINE = OpenVINOEngine()

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative and absolute. float32: sums in another order, and elementary functions of another library, both some units
in the last place. 16 bits: OpenVINO keeps more digits between two ops than torch, which rounds after each."""


def lowered(
    function: Callable[..., Any],
    *args: Any,
    fixed: Collection[int] = (),
    fallback: str = "error",
    **options: Any,
) -> tuple[CompiledGraph, GraphReport]:
    """A function of tensors and ints compiled for the engine: (compiled, report).

    Every size above 1 is a symbol, but those in ``fixed``.
    """
    fakes = symbolic(*args, fixed=fixed)
    mode = next(value.fake_mode for value in fakes if isinstance(value, FakeTensor))
    flat: list[Any] = []

    def listed(*given: Any) -> tuple[Any, ...]:
        leaves, spec = pytree.tree_flatten(function(*given))
        flat[:] = [spec]
        return tuple(leaves)

    captured = trace(listed, fakes, mode)
    report = GraphReport("a function", 0, "openvino")
    chosen = CompileOptions(fallback=fallback, small_regions="engine", **options)
    with collecting(report):
        return lower(captured, ENGINE, chosen), report


def same(
    function: Callable[..., Any],
    *args: Any,
    others: Sequence[Sequence[Any]] = (),
    fixed: Collection[int] = (),
    **tolerance: float,
) -> None:
    """Compile for the sizes of ``args``, and compare the results for these and for other arguments with eager's.

    Writes into arguments are compared too.
    """
    compiled, report = lowered(function, *args, fixed=fixed)
    assert not report.placed("eager")
    for given in (args, *others):
        ours, theirs = pytree.tree_map_only(torch.Tensor, torch.clone, (given, given))
        with torch.no_grad():
            results = compiled(*ours)
            expected = pytree.tree_leaves(function(*theirs))
        assert len(results) == len(expected)
        for one, other in zip((*results, *ours), (*expected, *theirs), strict=True):
            close(one, other, **tolerance)


def close(one: Any, other: Any, **tolerance: float) -> None:
    """Equal in dtype, sizes and, up to TOLERANCE, values; whole numbers and bools exactly."""
    if not isinstance(other, torch.Tensor):
        assert one == other
        return
    allowed = TOLERANCE.get(other.dtype, 0.0)
    torch.testing.assert_close(
        one, other, rtol=tolerance.get("rtol", allowed), atol=tolerance.get("atol", allowed), equal_nan=True
    )
