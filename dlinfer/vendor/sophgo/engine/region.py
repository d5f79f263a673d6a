"""A compiled region: its function as ONNX, and a bmodel for each set of sizes and weights that calls bring."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import NotExportableError
from dlinfer.graph.engine_kit.eager_region import eager_program, leave_for_a_call
from dlinfer.graph.engine_kit.held_weights import HeldWeights
from dlinfer.graph.engine_kit.output_sizes import reader, sizes_of
from dlinfer.graph.functional.function import function_of
from dlinfer.graph.ir.dialect import STATIC, fake
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.onnx.export import OPSET, OnnxGraph, export
from dlinfer.graph.options import CompileOptions
from dlinfer.vendor.sophgo.compiler.compile import compile_onnx
from dlinfer.vendor.sophgo.compiler.onnx_file import in_one_shape, onnx_bytes_or_file
from dlinfer.vendor.sophgo.compiler.translations import table
from dlinfer.vendor.sophgo.engine.net import Net
from dlinfer.vendor.sophgo.engine.nodes import FLOATS, lookups
from dlinfer.vendor.sophgo.engine.options import SophgoOptions
from dlinfer.vendor.sophgo.errors import SophgoCompileError

ENGINE = "sophgo"
_INT32 = torch.iinfo(torch.int32)


class MixedDtypesError(Exception):
    """A region computes in several dtypes of 16 bits, and a bmodel in one."""


class _ByTorchError(Exception):
    """A call that is not for the chip; its text says why."""


class Region:
    """Callable with the region's inputs; calls run one after the other, since a bmodel's memory is one.

    source: the model as text. Making one raises NotAFunctionError, NotExportableError, UnknownSizeError and
    MixedDtypesError; a call raises what the device does, and under the fallback policy ``error`` GraphFallbackError
    for sizes that cannot be compiled.
    """

    def __init__(
        self, region: Subgraph, options: CompileOptions, chosen: SophgoOptions, notes: list[str]
    ) -> None:
        self._region = region
        self._options = options
        self._chosen = chosen
        self._notes = notes
        self._function = function = function_of(region)
        placeholders = function.graph_module.graph.find_nodes(op="placeholder")
        self._names = [node.name for node in placeholders]
        graph = export(function.graph_module, opset=OPSET, translations=table)
        self._model, self._inputs, self._outputs = graph.to_bytes(), graph.inputs, graph.outputs
        self.source = str(graph)
        fakes = [fake(node) for node in placeholders]
        results: Sequence[Any] = function.graph_module.graph.output_node().args[0]  # pyright: ignore[reportAssignmentType]
        self._sizes = reader(sizes_of([fake(node).shape for node in results], fakes))
        self._dtypes = [fake(node).dtype for node in results]
        self._dtype = _floating(fakes, self._dtypes)
        found = lookups(function.graph_module)
        self._lookups = [self._names.index(name) for name, _ in found]
        self._rows = reader(sizes_of([[rows for _, rows in found]], fakes))
        written = {index for index in function.writes if index is not None}
        self._held = [
            index
            for index, node in enumerate(placeholders)
            if node.meta.get(STATIC) and index not in written and isinstance(fakes[index], Tensor)
        ]
        self._lock = threading.Lock()
        self._failed: dict[Any, str] = {}
        self._eager: Any = None
        self._weighted = HeldWeights(self._held, self._names, lambda weights: _Nets(self, weights), notes)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        self._function.check(inputs)
        try:
            self._refuse(inputs)
            if not self._outputs:
                return self._function.finish(inputs, [])  # views only
            with self._lock:
                values = self._weighted(*inputs)
        except _ByTorchError as reason:
            return self._by_torch(str(reason), inputs)
        for index, value in zip(self._function.writes, values, strict=True):
            if index is not None:
                inputs[index].copy_(value)
        return self._function.finish(inputs, values)

    def _refuse(self, inputs: Sequence[Any]) -> None:
        """Raise _ByTorchError for inputs that the bmodel would not take, or take for others."""
        conflict = self._function.conflict(inputs)
        if conflict is not None:
            raise _ByTorchError(conflict)
        for index, value in enumerate(inputs):
            if not isinstance(value, Tensor):
                continue
            if not value.numel():
                raise _ByTorchError(f"input {self._names[index]} has no elements")
            if (
                index not in self._held
                and value.dtype not in FLOATS
                and not _within(value, _INT32.min, _INT32.max)
            ):
                raise _ByTorchError(f"input {self._names[index]} goes beyond 32 bits")
        (limits,) = self._rows(inputs)
        for index, rows in zip(self._lookups, limits, strict=True):
            if not _within(inputs[index], 0, rows - 1):
                raise _ByTorchError(f"input {self._names[index]} looks up outside of {rows} rows")

    def _by_torch(self, reason: str, inputs: Sequence[Any]) -> tuple[Any, ...]:
        leave_for_a_call(self._region, ENGINE, reason, self._options.policy)
        if self._eager is None:
            self._eager = eager_program(self._region)
            self._notes.append(f"ran by torch at a call: {reason}")
        return self._eager(*inputs)

    # --- for _Nets

    def moving(self, inputs: Sequence[Any]) -> list[tuple[str, Any]]:
        """(name in the model, value) of what each call brings, numbers too."""
        return [(self._inputs[i], value) for i, value in enumerate(inputs) if i not in self._held]

    def results(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Memory for the results."""
        return [
            torch.empty(sizes, dtype=dtype)
            for sizes, dtype in zip(self._sizes(inputs), self._dtypes, strict=True)
        ]

    def compiled(
        self, key: Any, known: int, weights: Sequence[Tensor], moving: Sequence[tuple[str, Any]]
    ) -> Net:
        """A net for the sizes of a call. Raises _ByTorchError."""
        if key in self._failed:
            raise _ByTorchError(self._failed[key])
        if known >= self._chosen.max_shapes:
            raise _ByTorchError(f"more than {self._chosen.max_shapes} sets of sizes (max_shapes)")
        start = time.perf_counter()
        options = self._chosen.compiler(self._dtype)
        calibration = [_floats(moving)] if options.quantize == "INT8" else []
        with TemporaryDirectory(prefix="dlinfer-") as folder:
            try:
                model = onnx_bytes_or_file(*self._filled(weights, moving), Path(folder))
                path = compile_onnx(model, name="region", options=options, calibration=calibration)
            except (NotExportableError, SophgoCompileError) as error:
                reason = f"{options.chip} {options.quantize}: {error.explanation}"
                self._failed[key] = reason
                raise _ByTorchError(reason) from error
        sizes = ", ".join(str(list(v.shape)) if isinstance(v, Tensor) else str(v) for _, v in moving)
        seconds = time.perf_counter() - start
        self._notes.append(f"bmodel {options.quantize} for {options.chip}, inputs {sizes}: {seconds:.1f} s")
        return Net(path, self._chosen.device, len(self._outputs))

    def _filled(
        self, weights: Sequence[Tensor], moving: Sequence[tuple[str, Any]]
    ) -> tuple[OnnxGraph, dict[str, Tensor]]:
        """The model for one set of sizes, and what is to stand in it: weights, and numbers among the inputs."""
        import onnx
        import onnx_ir

        held = {self._inputs[index]: weight for index, weight in zip(self._held, weights, strict=True)}
        held |= {name: torch.tensor(value) for name, value in moving if not isinstance(value, Tensor)}
        model = onnx_ir.serde.deserialize_model(onnx.ModelProto.FromString(self._model))
        graph = OnnxGraph(model, self._inputs, self._outputs)
        in_one_shape(graph, {name: value.shape for name, value in moving if isinstance(value, Tensor)})
        return graph, held


class _Nets:
    """The nets of one state of the weights, by the sizes of what calls bring."""

    def __init__(self, region: Region, weights: Sequence[Tensor]) -> None:
        self._region = region
        self._weights = weights
        self._nets: dict[Any, Net] = {}

    def __call__(self, *inputs: Any) -> list[Tensor]:
        moving = self._region.moving(inputs)
        key = tuple(tuple(v.shape) if isinstance(v, Tensor) else v for _, v in moving)
        if key not in self._nets:
            self._nets[key] = self._region.compiled(key, len(self._nets), self._weights, moving)
        results = self._region.results(inputs)
        self._nets[key].run({name: value for name, value in moving if isinstance(value, Tensor)}, results)
        return results


def _floats(moving: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A call's inputs, for calibration."""
    return {name: value.float().numpy() for name, value in moving if isinstance(value, Tensor)}


def _within(value: Tensor, low: int, high: int) -> bool:
    least, most = value.aminmax()
    return int(least) >= low and int(most) <= high


def _floating(fakes: Sequence[Any], results: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that a region computes in: one of 16 bits if it has any. Raises MixedDtypesError."""
    found = {value.dtype for value in fakes if isinstance(value, Tensor)} | set(results)
    half = sorted(found & {torch.float16, torch.bfloat16}, key=str)
    if len(half) > 1:
        raise MixedDtypesError("it computes in float16 and bfloat16, and a bmodel in one of them")
    return half[0] if half else torch.float32
