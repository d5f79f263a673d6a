"""The graph engine ``onnxruntime``: a region as one ONNX model in one session."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dlinfer.errors import NotAFunctionError, NotExportableError
from dlinfer.graph.dialect import is_compute, tensors_of
from dlinfer.graph.eager_region import eager_region
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.fingerprint import forced_isa
from dlinfer.graph.known_answers.answer import KnownAnswer, kind_of, precision_of
from dlinfer.graph.known_answers.questions import QUESTIONS, put_all
from dlinfer.graph.known_answers.suite import KnownAnswers
from dlinfer.graph.onnx.refusal import Refusals, no_type_of_onnx
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.output_sizes import UnknownSizeError
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.torch_steps import TorchSteps
from dlinfer.vendor.onnxruntime import contrib, sessions
from dlinfer.vendor.onnxruntime.options import OrtOptions
from dlinfer.vendor.onnxruntime.region import Region

SMALLEST = 4
"""Nodes that compute which are worth entering a session: entering one costs as much as some of torch's kernels."""


class OnnxRuntimeEngine(TorchSteps):
    """Graphs through ONNX in ONNX Runtime."""

    name = sessions.ENGINE
    passes: Sequence[Pass] = ()
    stored_options: Collection[str] = ("graph_optimization",)
    phases_alike = False
    concurrent = True  # a session may run in many threads at once, each with a binding of its own

    def __init__(self) -> None:
        self._refusals = Refusals(
            opset=contrib.OPSET,
            translations=contrib.table,
            wrong_type=_wrong_type,
            fault=sessions.why_refused,
        )
        self.known_answers = KnownAnswers(_version, lambda: _answers(self))

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise CompileOptionError, or ProviderUnavailableError for a provider that is not installed."""
        sessions.check_providers(OrtOptions.of(options))

    def refuses(self, node: fx.Node) -> str | None:
        """What ONNX cannot say, and what ONNX Runtime's CPU provider, to which all others fall back, has not or does
        not compute rightly on this CPU."""
        if (reason := self._refusals.of(node)) is not None or node.op != "call_function":
            return reason
        values = [tensor for one in (node, *node.all_input_nodes) for tensor in tensors_of(one)]
        return self.known_answers.fault(kind_of(node.target).removesuffix("_"), precision_of(values))

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

    def identity(self, cache_dir: Path) -> str:
        """The version of ONNX Runtime, and what decides which nodes it is trusted with."""
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}\n{forced_isa()}"


def _version() -> str:
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__}"


def _answers(engine: OnnxRuntimeEngine) -> Iterator[KnownAnswer]:
    """Of the CPU provider; bfloat16 is not taken."""
    return put_all(engine, asdict(OrtOptions()), QUESTIONS, (torch.float32, torch.float16))


def _wrong_type(dtype: torch.dtype) -> str | None:
    if dtype == torch.bfloat16:
        return "bfloat16: ONNX Runtime's CPU provider has kernels for a few ops only"
    return no_type_of_onnx(dtype)
