"""The graph engine ``sophgo``: a region as a bmodel for each of its sizes, on a chip or its emulator."""

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
    """Graphs through ONNX and Sophgo's compiler on its chips."""

    name = "sophgo"
    options_type = SophgoOptions
    stored_options: Collection[str] = ("chip", "quantize", "group_size")
    smallest = 4  # compiling takes seconds, entering it a copy each way

    def __init__(self) -> None:
        missing = packages.missing(packages.ONNX)
        if missing:
            reason = f"{missing} not installed; {packages.ADVICE}"
            raise EngineUnavailableError(engine=self.name, reason=reason, available="those of other vendors")
        self._refusals = Refusals(translations=table, fault=nodes.fault)

    def is_heavy(self, node: fx.Node) -> bool:
        """Products of matrices."""
        return flops_of(node) > 0

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Types that ONNX does not have."""
        return no_type_of_onnx(dtype)

    def refuses_op(self, node: fx.Node) -> str | None:
        """What is not in numbers that the chip computes with, ONNX cannot say, or was not tried with the compiler."""
        return nodes.wrong_numbers(node) or self._refusals.of(node)

    def lower(self, function: Function, options: SophgoOptions, policy: str) -> Lowered:
        """Return the function as ONNX; its bmodels are compiled when calls tell sizes and weights."""
        chosen, which = settled(options)
        lowered = SophgoLowered(function, chosen)
        lowered.notes.append(which)
        return lowered

    def identity(self, cache_dir: Path) -> str:
        """Return the version of the compiler."""
        return compiler_version()
