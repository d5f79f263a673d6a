"""The graph engine ``qaic``: a region becomes an .onnx file, and the file a Session.

``engine_options`` are the Session's options: ``backend`` aic (a card, the default) or onnxruntime (this CPU), and
those of ``option_table.py`` but for what the engine sets itself.
"""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dlinfer.errors import CompileOptionError, NotAFunctionError, NotExportableError
from dlinfer.graph import values
from dlinfer.graph.dialect import STATIC, fake, is_compute, written_arguments
from dlinfer.graph.eager_region import eager_region
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.held_weights import HeldWeights
from dlinfer.graph.onnx.export import OnnxGraph, export
from dlinfer.graph.onnx.refusal import Refusals
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.output_sizes import UnknownSizeError, reader, sizes_of
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.torch_steps import TorchSteps
from dlinfer.vendor.qaic import model_writer, sdk
from dlinfer.vendor.qaic.errors import (
    QaicCompileError,
    QaicOptionError,
    QaicResultError,
    QaicUnavailableError,
)
from dlinfer.vendor.qaic.option_table import OPTIONS
from dlinfer.vendor.qaic.options import Options
from dlinfer.vendor.qaic.session import BACKENDS, Session

OWN = ("onnx_define_symbol", "output_dir", "enable_metrics", "enable_profiling")
"""Options that speak of one model's symbols, files and runs; an engine has many models, and its users no Session."""

CHANGING_SIZES = (
    "its sizes change between calls, and a QPC is compiled for fixed ones (dynamic=False fixes them)"
)

TYPES = frozenset(
    {
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    }
)
"""What a Session's arrays may be: numpy has no bfloat16."""


class QaicEngine(TorchSteps):
    """Regions through Qualcomm's Session."""

    name = "qaic"
    passes: Sequence[Pass] = ()
    phases_alike = False
    stored_options = ("convert_to_fp16",)
    concurrent = True  # a Session may run in many threads at once

    def __init__(self) -> None:
        self._refusals = Refusals(wrong_type=_wrong_type)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """The Session's options, but for ``OWN``. Raises CompileOptionError."""
        for name, value in options.items():
            if name in OWN or name not in (*OPTIONS, "backend"):
                known = ", ".join(["backend", *(one for one in OPTIONS if one not in OWN)])
                raise _refused(name, value, f"one of {known}")
        if options.get("backend", "aic") not in BACKENDS:
            raise _refused("backend", options["backend"], " or ".join(map(repr, BACKENDS)))
        try:
            Options({name: value for name, value in options.items() if name != "backend"})
        except QaicOptionError as error:
            given, expected = error.fields["given"], error.fields["expected"]
            raise _refused(error.fields["option"], given, expected) from error

    def refuses(self, node: fx.Node) -> str | None:
        """Writes, types without a numpy type, other devices, and what has no translation to ONNX."""
        if written_arguments(node):
            return "it writes, and a Session gives new arrays: a KV cache would be copied at every call"
        return self._refusals.of(node)

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """A region of views and sizes only has nothing for a card to do."""
        return None if any(map(is_compute, nodes)) else "it computes nothing"

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """The region as a Session, made at its first call, when its weights are known.

        A model that the Session's compiler refuses then runs by torch, under the fallback policy.

        Raises QaicUnavailableError where a card is asked for and the SDK is not there.
        """
        given = options.wanted_engine_options
        backend = given.get("backend", "aic")
        if backend == "aic":
            _require_sdk()
            if _has_symbols(region.graph_module):
                return eager_region(region, self.name, options, CHANGING_SIZES)
        try:
            function = values.function_of(region)
            model = export(function.graph_module)
            give_back = functools.partial(eager_region, region, self.name, options)
            run = RegionRun(function, model, {**given, "backend": backend}, give_back)
        except (NotAFunctionError, NotExportableError) as error:
            node, reason = str(error.fields["node"]), str(error.fields["reason"])
            return eager_region(region, self.name, options, f"node {node}: {reason}", {node: reason})
        except UnknownSizeError as cause:
            reason = f"a result's size does not follow from inputs: {cause}"
            return eager_region(region, self.name, options, reason)
        computing = [node for node in region.graph_module.graph.nodes if is_compute(node)]
        placement = {node.name: f"qaic session, backend {backend}" for node in computing}
        return CompiledRegion(run, placement, notes=run.notes)

    def identity(self, cache_dir: Path) -> str:
        """Nothing that is stored depends on the SDK."""
        return ""


class RegionRun:
    """Callable with a region's inputs; threads may call it at once.

    give_back: makes the region a program of torch, for a reason, or raises where the policy wants that.
    """

    def __init__(
        self,
        function: values.Function,
        model: OnnxGraph,
        options: Mapping[str, Any],
        give_back: Callable[[str], CompiledRegion],
    ) -> None:
        self.notes: list[str] = []
        self.source = f"Session(backend={options['backend']!r}) of {len(list(model.model.graph))} ONNX nodes"
        self._function = function
        self._model = model
        self._options = options
        placeholders = function.graph_module.graph.find_nodes(op="placeholder")
        static = [
            bool(node.meta.get(STATIC)) and isinstance(fake(node), torch.Tensor) for node in placeholders
        ]
        held = [index for index, one in enumerate(static) if one]
        self._held = model_writer.hold(model, tuple(model.inputs[index] for index in held))
        outputs: Any = function.graph_module.graph.output_node().args[0]
        self._results = [fake(node) for node in outputs]
        self._sizes = reader(
            sizes_of([value.shape for value in self._results], [fake(n) for n in placeholders])
        )
        self._fed = [(index, model.inputs[index]) for index, one in enumerate(static) if not one]
        self._run = HeldWeights(held, model.inputs, self._build, self.notes)
        self._give_back = give_back
        self._by_torch: Callable[..., tuple[Any, ...]] | None = None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self._by_torch is not None:
            return self._by_torch(*inputs)
        self._function.check(inputs)
        try:
            outputs = self._run(*inputs)
        except QaicCompileError as error:
            self.notes.append(f"runs by torch: {error.explanation}")
            by_torch = self._by_torch = self._give_back(error.explanation).run
            return by_torch(*inputs)
        return self._function.finish(inputs, outputs)

    def _build(self, weights: tuple[torch.Tensor, ...]) -> Callable[..., list[torch.Tensor]]:
        """A Session with these weights; its backend keeps a copy of them, the file goes again."""
        with tempfile.TemporaryDirectory(prefix="dlinfer-qaic-") as folder:
            path = model_writer.write(self._model, dict(zip(self._held, weights, strict=True)), Path(folder))
            session = Session(path, **self._options)
        if weights:
            size = sum(weight.nbytes for weight in weights)
            self.notes.append(f"the backend holds a copy of {len(weights)} weights, {size} bytes")
        types = {name: dtype for name, (_, dtype) in session.model_input_shape_dict().items()}
        fed = [(index, name, types[name]) for index, name in self._fed if name in types]

        def run(*inputs: Any) -> list[torch.Tensor]:
            arrays = {name: _array(inputs[index], dtype) for index, name, dtype in fed}
            outputs = session.run(arrays)
            return self._checked([torch.from_numpy(outputs[name]) for name in self._model.outputs], inputs)

        return run

    def _checked(self, results: list[torch.Tensor], inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Results that are what the graph says of them. Raises QaicResultError."""
        for name, result, sizes, value in zip(
            self._model.outputs, results, self._sizes(inputs), self._results, strict=True
        ):
            if result.dtype != value.dtype or tuple(result.shape) != sizes:
                raise QaicResultError(
                    backend=self._options["backend"],
                    name=name,
                    given=f"{result.dtype} {list(result.shape)}",
                    expected=f"{value.dtype} {list(sizes)}",
                )
        return results


def _array(value: Any, dtype: Any) -> Any:
    """An input for a Session: a tensor's own memory where it is contiguous; a size as a scalar."""
    import numpy as np

    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().numpy()
    return np.array(value, dtype)


def _wrong_type(dtype: torch.dtype) -> str | None:
    return None if dtype in TYPES else f"a tensor of {dtype}, which a Session's numpy arrays cannot be"


def _has_symbols(graph_module: fx.GraphModule) -> bool:
    fakes = [fake(node) for node in graph_module.graph.find_nodes(op="placeholder")]
    return any(
        not isinstance(value, torch.Tensor) or any(not isinstance(size, int) for size in value.shape)
        for value in fakes
    )


def _require_sdk() -> None:
    lacking = sdk.missing(compiling=True)
    if lacking:
        raise QaicUnavailableError(
            what="compile a graph for a card",
            missing="; ".join(lacking),
            advice="install Qualcomm's Cloud AI Platform and Apps SDKs with the package qaic, or run the graph here: "
            "options={'engine': 'qaic', 'engine_options': {'backend': 'onnxruntime'}}",
        )


def _refused(name: str, given: Any, expected: str) -> CompileOptionError:
    return CompileOptionError(option=f"engine_options[{name!r}]", given=given, expected=expected)
