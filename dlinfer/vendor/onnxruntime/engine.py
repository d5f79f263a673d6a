"""The graph engine ``onnxruntime``: a region as one ONNX model in one session."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from dlinfer.errors import NotAFunctionError, NotExportableError
from dlinfer.graph.cache import MissingEntryError
from dlinfer.graph.dialect import is_compute
from dlinfer.graph.eager_region import eager_region
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.output_sizes import UnknownSizeError
from dlinfer.vendor.onnxruntime import sessions
from dlinfer.vendor.onnxruntime.judge import Judge
from dlinfer.vendor.onnxruntime.options import OrtOptions
from dlinfer.vendor.onnxruntime.region import Region

SMALLEST = 4
"""Nodes that compute which are worth entering a session: entering one costs as much as some of torch's kernels."""


class OnnxRuntimeEngine:
    """Graphs through ONNX in ONNX Runtime."""

    name = sessions.ENGINE
    passes = ()
    phases_alike = False

    def __init__(self) -> None:
        self._judge = Judge()

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise CompileOptionError, or ProviderUnavailableError for a provider that is not installed."""
        sessions.check_providers(OrtOptions.of(options))

    def refuses(self, node: fx.Node) -> str | None:
        """What ONNX cannot say, and what ONNX Runtime's CPU provider, to which all others fall back, has not."""
        return self._judge.refuses(node)

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """A few nodes run as fast one by one."""
        count = sum(map(is_compute, nodes))
        return f"{count} nodes are too few to enter ONNX Runtime for" if count < SMALLEST else None

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """The region as a session; by torch under the policy where ONNX Runtime does not take the whole of it.

        Raises GraphFallbackError under the policy ``error``, ProviderUnavailableError and ProviderFallbackError.
        """
        chosen = OrtOptions.of(options.wanted_engine_options)
        result = CompiledRegion(run=None)
        try:
            result.run = Region(region, options, chosen, result.notes)
        except (NotAFunctionError, NotExportableError) as error:
            reason = str(error.fields["reason"])
            return eager_region(region, self.name, options, reason, {str(error.fields["node"]): reason})
        except UnknownSizeError as unknown:
            return eager_region(region, self.name, options, f"a result of unknown size: {unknown}")
        except sessions.SessionRefusedError as refused:
            return eager_region(region, self.name, options, f"ONNX Runtime: {refused}")
        for node in region.graph_module.graph.nodes:
            if is_compute(node):
                result.placement[node.name] = "session"
        return result

    def resolve(self, callee: str) -> Callable[..., Any]:
        """Its regions are no programs."""
        raise KeyError(callee)

    def restore(self, callees: Collection[str], cache_dir: Path) -> None:
        """Raises MissingEntryError: sessions are not stored."""
        if callees:
            raise MissingEntryError(next(iter(callees)))

    def keeps(self, callees: Collection[str]) -> bool:
        """Sessions are not stored."""
        return not callees

    def identity(self, cache_dir: Path) -> str:
        """The version of ONNX Runtime."""
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}"
