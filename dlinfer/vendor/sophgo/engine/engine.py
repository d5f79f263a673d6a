"""The graph engine ``sophgo``: a region as a bmodel for each of its sizes, on a chip or its emulator."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from dlinfer.errors import EngineUnavailableError, NotAFunctionError, NotExportableError
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.engine_kit.eager_region import eager_region
from dlinfer.graph.engine_kit.output_sizes import UnknownSizeError
from dlinfer.graph.engine_kit.torch_steps import TorchSteps
from dlinfer.graph.ir.dialect import is_compute
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.ir.flops import flops_of
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.vendor.sophgo.compiler import packages
from dlinfer.vendor.sophgo.compiler.process import compiler_version
from dlinfer.vendor.sophgo.engine import nodes
from dlinfer.vendor.sophgo.engine.chip import settled
from dlinfer.vendor.sophgo.engine.options import SophgoOptions
from dlinfer.vendor.sophgo.engine.region import ENGINE, MixedDtypesError, Region

SMALLEST = 4
"""Nodes that are worth a bmodel, none of which is a product: compiling takes seconds, entering it a copy each way."""


class SophgoEngine(TorchSteps):
    """Graphs through ONNX and Sophgo's compiler on its chips."""

    name = ENGINE
    passes: Sequence[Pass] = ()
    stored_options: Collection[str] = ("chip", "quantize", "group_size")
    phases_alike = False

    def __init__(self) -> None:
        missing = packages.missing(packages.ONNX)
        if missing:
            reason = f"{missing} not installed; {packages.ADVICE}"
            raise EngineUnavailableError(engine=self.name, reason=reason, available="those of other vendors")
        self._refusals = nodes.refusals()

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise CompileOptionError."""
        SophgoOptions.of(options)

    def refuses(self, node: fx.Node) -> str | None:
        """What ONNX cannot say, and what was not tried with Sophgo's compiler."""
        return nodes.refusal(node, self._refusals)

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """A few nodes without a product among them run as fast one by one."""
        count = sum(map(is_compute, nodes))
        if count >= SMALLEST or any(map(flops_of, nodes)):
            return None
        return f"{count} nodes without a product are too few for a bmodel"

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """The region, whose bmodels are compiled when its first call tells sizes and weights.

        What the compiler then refuses runs by torch under the policy. Raises GraphFallbackError under ``error``.
        """
        chosen, which = settled(SophgoOptions.of(options.wanted_engine_options))
        result = CompiledRegion(run=None, notes=[which])
        try:
            result.run = Region(region, options, chosen, result.notes)
        except (NotAFunctionError, NotExportableError) as error:
            reason = str(error.fields["reason"])
            return eager_region(region, self.name, options, reason, {str(error.fields["node"]): reason})
        except UnknownSizeError as unknown:
            return eager_region(region, self.name, options, f"a result of unknown size: {unknown}")
        except MixedDtypesError as mixed:
            return eager_region(region, self.name, options, str(mixed))
        for node in region.graph_module.graph.nodes:
            if is_compute(node):
                result.placement[node.name] = "bmodel"
        return result

    def identity(self, cache_dir: Path) -> str:
        """The version of the compiler."""
        return compiler_version()
