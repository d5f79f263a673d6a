"""The graph engine ``onnxruntime``. A region runs as one ONNX model in one session, on torch's own memory."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import fx

from dlinfer.graph.engine_kit.value_engine import ValueEngine
from dlinfer.graph.engine_kit.value_region import Lowered
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.onnx.support import Refusals, no_type_of_onnx
from dlinfer.graph.selftest.case import Case
from dlinfer.graph.selftest.suite import SelfTest
from dlinfer.graph.selftest.torch_cases import TORCH_CASES, engine_cases
from dlinfer.vendor.onnxruntime import differs, empty_operands, sessions
from dlinfer.vendor.onnxruntime.options import OrtOptions
from dlinfer.vendor.onnxruntime.run import OrtLowered
from dlinfer.vendor.onnxruntime.translations import contrib, packed


class OnnxRuntimeEngine(ValueEngine[OrtOptions]):
    """Runs regions of a graph as ONNX models in ONNX Runtime."""

    name = sessions.ENGINE
    options_type = OrtOptions
    stored_options: Collection[str] = ("graph_optimization", "accuracy_level")
    concurrent = True  # a session may run in many threads at once, each with a binding of its own
    smallest = 4  # entering a session costs as much as some of torch's kernels

    def __init__(self) -> None:
        self._refusals = Refusals(opset=contrib.OPSET, translations=contrib.table, fault=sessions.why_refused)
        self.selftest = SelfTest(lambda: f"ONNX Runtime {sessions.version()}", self._cases)

    def read_options(self, options: Mapping[str, object]) -> OrtOptions:
        """Return the options. Raises CompileOptionError, or ProviderUnavailableError if a provider is not installed."""
        chosen = super().read_options(options)
        sessions.check_providers(chosen)
        return chosen

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Return a reason to refuse a dtype if the CPU provider has few or no kernels for it; else None.

        Every other provider falls back to the CPU provider.
        """
        if dtype == torch.bfloat16:
            return "it uses bfloat16, and ONNX Runtime's CPU provider has only a few kernels for it"
        return no_type_of_onnx(dtype)

    def refuses_op(self, node: fx.Node) -> str | None:
        """Return a reason to refuse a node; None if ONNX Runtime's CPU provider computes it as torch does."""
        if node.target is packed.OP:
            return packed.refusal(node)
        return empty_operands.refusal(node) or differs.refusal(node) or self._refusals.of(node)

    def lower(self, function: Function, options: OrtOptions, policy: str) -> Lowered:
        """Convert the function to an ONNX model. policy: the fallback policy.

        The result's ``compile`` may raise ProviderUnavailableError and ProviderFallbackError.
        """
        return OrtLowered(function, options, policy)

    def identity(self, cache_dir: Path) -> str:
        return f"onnxruntime {sessions.version()}"

    def _cases(self) -> Iterator[Case]:
        """Yield the self-test's cases for the CPU provider, which every other provider falls back to.

        There are no bfloat16 cases, since the CPU provider lacks bfloat16.
        """
        return engine_cases(self, asdict(OrtOptions()), TORCH_CASES, (torch.float32, torch.float16))
