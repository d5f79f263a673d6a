"""The graph engine ``sophgo``. It compiles a region for a chip or its emulator, to one bmodel for each set of sizes."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import fx

from dlinfer.errors import EngineUnavailableError
from dlinfer.graph.engine_kit.value_engine import ValueEngine
from dlinfer.graph.engine_kit.value_region import Lowered
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.flops import flops_of
from dlinfer.graph.onnx.support import Refusals, no_type_of_onnx
from dlinfer.vendor.sophgo.compiler import packages
from dlinfer.vendor.sophgo.compiler.process import compiler_version
from dlinfer.vendor.sophgo.compiler.translations import table
from dlinfer.vendor.sophgo.engine import nodes
from dlinfer.vendor.sophgo.engine.chip import settled
from dlinfer.vendor.sophgo.engine.lowered import SophgoLowered
from dlinfer.vendor.sophgo.engine.options import SophgoOptions


class SophgoEngine(ValueEngine[SophgoOptions]):
    """Compiles regions of a graph to bmodels: it converts them to ONNX, which Sophgo's compiler reads."""

    name = "sophgo"
    options_type = SophgoOptions
    stored_options: Collection[str] = ("chip", "quantize", "group_size")
    smallest = 4  # compiling takes seconds, and each call copies both ways

    def __init__(self) -> None:
        missing = packages.missing(packages.ONNX)
        if missing:
            reason = f"{missing} not installed; {packages.ADVICE}"
            raise EngineUnavailableError(
                engine=self.name, reason=reason, available="the engines of other vendors"
            )
        self._refusals = Refusals(translations=table, fault=nodes.fault)

    def is_heavy(self, node: fx.Node) -> bool:
        """Return whether the node is a matrix product, a convolution or an attention."""
        return flops_of(node) > 0

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Return a reason to refuse a dtype if ONNX lacks it; else None."""
        return no_type_of_onnx(dtype)

    def refuses_op(self, node: fx.Node) -> str | None:
        """Return a reason to refuse a node; None if the chip can run it.

        A node is refused if the chip lacks its dtypes, if ONNX cannot express it, or if its ONNX ops were not tested
        with the compiler."""
        return nodes.wrong_numbers(node) or self._refusals.of(node)

    def lower(self, function: Function, options: SophgoOptions, policy: str) -> Lowered:
        """Export the function to ONNX. policy: the fallback policy, which has no effect here.

        Bmodels are compiled later: the first call with new sizes or weights compiles one."""
        resolved, reason = settled(options)
        lowered = SophgoLowered(function, resolved)
        lowered.notes.append(reason)
        return lowered

    def identity(self, cache_dir: Path) -> str:
        return compiler_version()
