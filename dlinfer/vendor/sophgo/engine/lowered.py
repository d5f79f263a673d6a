"""A region's function as ONNX, and the bmodels that are compiled from it, one for each set of sizes and weights."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import NotExportableError
from dlinfer.graph.engine_kit.output_sizes import reader, sizes_of
from dlinfer.graph.engine_kit.refused import RefusedError, WrongInputError
from dlinfer.graph.engine_kit.value_region import Lowered
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.onnx.export import OPSET, OnnxGraph, export
from dlinfer.vendor.sophgo.compiler.compile import compile_onnx
from dlinfer.vendor.sophgo.compiler.onnx_file import in_one_shape, onnx_bytes_or_file
from dlinfer.vendor.sophgo.compiler.translations import table
from dlinfer.vendor.sophgo.engine.net import Net
from dlinfer.vendor.sophgo.engine.nodes import FLOATS, lookups
from dlinfer.vendor.sophgo.engine.options import SophgoOptions
from dlinfer.vendor.sophgo.errors import SophgoCompileError

_INT32 = torch.iinfo(torch.int32)


class SophgoLowered(Lowered):
    """A function as ONNX. The constructor raises RefusedError if the function has both float16 and bfloat16."""

    placement = "bmodel"

    def __init__(self, function: Function, options: SophgoOptions) -> None:
        super().__init__(function, function.weights)
        self.options = options
        self._names = [node.name for node in function.inputs]
        fakes = [fake(node) for node in function.inputs]
        self.dtype = _floating([*fakes, *map(fake, function.outputs)])
        graph = export(function.graph_module, opset=OPSET, translations=table)
        self.model, self.inputs, self.results = graph.to_bytes(), graph.inputs, graph.outputs
        self.source = str(graph)
        tables = lookups(function.graph_module)
        self._lookups = [self._names.index(name) for name, _ in tables]
        self._rows = reader(sizes_of([[rows for _, rows in tables]], fakes))

    def check(self, inputs: Sequence[Any]) -> None:
        """Check a call's inputs before the device gets them.

        Raises RefusedError for a tensor without elements, or with integers of more than 32 bits.
        Raises WrongInputError for an index outside the rows that it looks up."""
        for index, value in enumerate(inputs):
            if not isinstance(value, Tensor):
                continue
            if not value.numel():
                raise RefusedError(f"input {self._names[index]} has no elements")
            whole = index not in self.held and value.dtype not in FLOATS
            if whole and not _within(value, _INT32.min, _INT32.max):
                raise RefusedError(f"input {self._names[index]} has values that do not fit into 32 bits")
        (limits,) = self._rows(inputs)
        for index, rows in zip(self._lookups, limits, strict=True):
            if not _within(inputs[index], 0, rows - 1):  # the chip would read other memory
                raise WrongInputError(f"input {self._names[index]} has an index outside the {rows} rows")

    def compile(self, weights: tuple[Tensor, ...]) -> "Nets":
        return Nets(self, weights)


class Nets:
    """A callable that takes a function's inputs and returns its outputs. The first call with new sizes compiles a net.

    Threads take turns, since all calls use the same memory of a bmodel.
    Raises RefusedError for sizes that cannot be compiled.
    Raises the errors of the device."""

    def __init__(self, lowered: SophgoLowered, weights: Sequence[Tensor]) -> None:
        self._lowered = lowered
        names = lowered.inputs
        self._weights = {names[index]: weight for index, weight in zip(lowered.held, weights, strict=True)}
        self._moving = [(index, name) for index, name in enumerate(names) if index not in lowered.held]
        self._nets: dict[Any, Net | str] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> list[Tensor]:
        moving = {name: inputs[index] for index, name in self._moving}
        tensors = {name: value for name, value in moving.items() if isinstance(value, Tensor)}
        key = tuple(tuple(v.shape) if isinstance(v, Tensor) else v for v in moving.values())
        results = self._lowered.outputs.empty(inputs)
        with self._lock:
            if key not in self._nets:
                self._nets[key] = self._compiled(moving, tensors)
            net = self._nets[key]
            if isinstance(net, str):
                raise RefusedError(net)
            net.run(tensors, results)
        return results

    def _compiled(self, moving: dict[str, Any], tensors: dict[str, Tensor]) -> Net | str:
        """Compile a net for the sizes of a call, and return it. If the compiler fails, return its reason as text.

        moving: the inputs by name, without weights. tensors: the inputs in ``moving`` that are tensors, not numbers.
        Raises RefusedError if there are ``max_shapes`` nets already."""
        lowered, start = self._lowered, time.perf_counter()
        most = lowered.options.max_shapes
        if sum(isinstance(net, Net) for net in self._nets.values()) >= most:
            raise RefusedError(f"calls have more than {most} sets of sizes (max_shapes)")
        options = lowered.options.compiler(lowered.dtype)
        with TemporaryDirectory(prefix="dlinfer-") as folder:
            try:
                model = onnx_bytes_or_file(*self._filled(moving, tensors), Path(folder))
                arrays = {name: value.float().numpy() for name, value in tensors.items()}
                calibration = [arrays] if options.quantize == "INT8" else []
                path = compile_onnx(model, name="region", options=options, calibration=calibration)
            except (NotExportableError, SophgoCompileError) as error:
                return f"{options.chip} {options.quantize}: {error.explanation}"
        sizes = ", ".join(str(list(v.shape)) if isinstance(v, Tensor) else str(v) for v in moving.values())
        seconds = time.perf_counter() - start
        lowered.notes.append(f"bmodel {options.quantize} for {options.chip}, inputs {sizes}: {seconds:.1f} s")
        return Net(path, lowered.options.device, len(lowered.results))

    def _filled(
        self, moving: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[OnnxGraph, dict[str, Tensor]]:
        """Return the ONNX graph with the sizes of a call, and its constants: weights, and inputs that are numbers."""
        import onnx
        import onnx_ir

        numbers = {name: torch.tensor(value) for name, value in moving.items() if name not in tensors}
        model = onnx_ir.serde.deserialize_model(onnx.ModelProto.FromString(self._lowered.model))
        graph = OnnxGraph(model, self._lowered.inputs, self._lowered.results)
        in_one_shape(graph, {name: value.shape for name, value in tensors.items()})
        return graph, self._weights | numbers


def _within(value: Tensor, low: int, high: int) -> bool:
    least, most = value.aminmax()
    return int(least) >= low and int(most) <= high


def _floating(values: Sequence[Any]) -> torch.dtype:
    """Return float16 or bfloat16 if some of these values have this dtype, else float32.

    Raises RefusedError if both float16 and bfloat16 occur."""
    half = {value.dtype for value in values if isinstance(value, Tensor)} & {torch.float16, torch.bfloat16}
    if len(half) > 1:
        raise RefusedError("it computes in float16 and bfloat16, but a bmodel can have only one of them")
    return half.pop() if half else torch.float32
