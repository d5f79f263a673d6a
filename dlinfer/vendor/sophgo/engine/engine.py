"""The graph engine ``sophgo``: it compiles a region to a bmodel for each set of sizes, for a chip or its emulator."""

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
    """Compiles regions of a graph by way of ONNX, with Sophgo's compiler."""

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
        """Return whether the node multiplies matrices."""
        return flops_of(node) > 0

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Return why ONNX has no such dtype; None if it has it."""
        return no_type_of_onnx(dtype)

    def refuses_op(self, node: fx.Node) -> str | None:
        """Return why the chip or ONNX cannot run a node, or that its ONNX ops are not tested with the compiler.

        None if neither holds."""
        return nodes.wrong_numbers(node) or self._refusals.of(node)

    def lower(self, function: Function, options: SophgoOptions, policy: str) -> Lowered:
        """Export the function to ONNX. Bmodels are compiled later, at calls, for the sizes and weights of the call."""
        resolved, reason = settled(options)
        lowered = SophgoLowered(function, resolved)
        lowered.notes.append(reason)
        return lowered

    def identity(self, cache_dir: Path) -> str:
        return compiler_version()
