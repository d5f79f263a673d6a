"""A graph engine for runtimes that read ONNX models. The vendor implements two methods, ``fault`` and ``session``."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from dlinfer.graph.engine_kit.value_engine import Options, ValueEngine
from dlinfer.graph.engine_kit.value_region import Executable, Lowered
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.onnx.export import OPSET, export
from dlinfer.graph.onnx.support import Refusals, fault_by_onnx, no_type_of_onnx
from dlinfer.graph.onnx.torch_semantics import refuse_negative
from dlinfer.graph.onnx.translations.writing import Table
from dlinfer.graph.onnx.weights import OnnxModel

Session = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
"""A function from {input name: contiguous tensor} to the outputs, in the model's order."""


class OnnxEngine(ValueEngine[Options]):
    """An engine for runtimes that read ONNX.

    opset: the ONNX opset version of the models.
    translations: a static method that returns translations of torch ops to onnxscript. They are tried before the
        standard translations.
    placement: the word for this engine's nodes in reports.
    """

    opset = OPSET
    translations: Callable[[], Table] | None = None
    placement = "session"

    def __init__(self) -> None:
        self._refusals = Refusals(opset=self.opset, translations=self.translations, fault=self.fault)

    # --- what a vendor implements

    @abstractmethod
    def session(self, model: OnnxModel, options: Options) -> Session:
        """Return a session that runs a model. Raises RefusedError if the vendor refuses the model.

        The model contains the weights. dlinfer does not need the model after this call.
        """

    def fault(self, model: bytes) -> str | None:
        """Return a reason not to run a model of a single node; None if the vendor accepts the model.

        dlinfer calls this once for each kind of node. By default ONNX's own checker decides.
        """
        return fault_by_onnx(model)

    # --- the engine

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        return no_type_of_onnx(dtype)

    def refuses_op(self, node: fx.Node) -> str | None:
        return self._refusals.of(node)

    def lower(self, function: Function, options: Options, policy: str) -> Lowered:
        return OnnxLowered(self, function, options)


class OnnxLowered(Lowered):
    """A functionalized region as an ONNX graph. Each session gets a model that contains the weights."""

    def __init__(self, engine: OnnxEngine[Options], function: Function, options: Options) -> None:
        super().__init__(function, function.weights)
        self.placement = engine.placement
        graph = fx.Graph()
        graph.output(graph.graph_copy(function.graph_module.graph, {}))
        refuse_negative(graph)
        graph_module = fx.GraphModule(function.graph_module, graph, type(function.graph_module).__name__)
        self.graph = export(graph_module, opset=engine.opset, translations=engine.translations)
        self.source = str(self.graph)
        self._engine = engine
        self._options = options

    def compile(self, weights: tuple[Tensor, ...]) -> Executable:
        names = self.graph.inputs
        held = {names[index]: weight for index, weight in zip(self.held, weights, strict=True)}
        session = self._engine.session(OnnxModel(self.graph, held), self._options)
        if weights:
            size = sum(weight.nbytes for weight in weights)
            self.notes.append(f"the session holds copies of {len(weights)} weights, {size} bytes")
        fed = [(index, name) for index, name in enumerate(names) if name not in held]

        def run(*inputs: Tensor | float) -> Sequence[Tensor]:
            return session({name: as_tensor(inputs[index]) for index, name in fed})

        return run


def as_tensor(value: Tensor | float) -> Tensor:
    """Return an input as ONNX takes it: a contiguous tensor, or a 0-d tensor for a number."""
    if not isinstance(value, Tensor):
        return torch.tensor(value)
    return value.detach().contiguous()
