"""Export a functionalized graph as an ONNX model.

``export`` takes a graph from ``dlinfer.graph.functional``: ATen ops before dispatch and dlinfer's own ops, symbolic
sizes, no writes. Every placeholder, even of a weight, becomes an input of the model, in the graph's order. Symbolic
sizes become named dimensions. The caller stores weights in a file, or binds their memory to a session.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor, fx

from dlinfer.errors import NotExportableError
from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.ir.dialect import fake, op_name
from dlinfer.graph.onnx.decompose import Decomposed
from dlinfer.graph.onnx.exporter_faults import refuse_faults
from dlinfer.graph.onnx.torch_semantics import promote
from dlinfer.graph.onnx.translations import standard_table
from dlinfer.graph.onnx.translations.writing import Table, written_for
from dlinfer.graph.torch_private.onnx import Registry, UntranslatableError

OPSET = 18
"""The opset of the standard translations, old enough for vendors' compilers."""

if TYPE_CHECKING:
    import onnx_ir


@dataclass(frozen=True)
class OnnxGraph:
    """A model with the names of its inputs and outputs.

    model: an ``onnx_ir.Model`` without weights.
    inputs: a name for each placeholder of the graph, in order.
    outputs: a name for each output of the graph, in order.
    """

    model: "onnx_ir.Model"
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __len__(self) -> int:
        return len(list(self.model.graph))

    def __str__(self) -> str:
        return "\n".join(str(node) for node in self.model.graph)

    def to_bytes(self) -> bytes:
        import onnx_ir

        return onnx_ir.serde.serialize_model(self.model).SerializeToString()


def export(
    graph_module: fx.GraphModule, *, opset: int = OPSET, translations: Callable[[], Table] | None = None
) -> OnnxGraph:
    """Return a graph as ONNX.

    graph_module: the graph. Every node has its fake in ``meta["val"]``.
    opset: at least ``OPSET``.
    translations: a function that returns a dict, torch op -> translation. These translations are preferred to the
        standard ones. The dict is cached.
    Raises NotExportableError, which names the node, if an op has no translation, or the translation refuses the call.
    """
    device = graph_device(map(fake, graph_module.graph.find_nodes(op="placeholder")))
    registry = _registry(opset, translations)
    decomposed = Decomposed(graph_module, registry)
    graph = decomposed.graph
    promote(graph)
    try:
        refuse_faults(graph, registry)
        with written_for(device.type):
            model = registry.translate(graph, type(graph_module).__name__)
    except UntranslatableError as error:
        named = next((node for node in graph_module.graph.nodes if node.name == error.node), None)
        op = op_name(named) if named is not None else "an op of the graph"
        raise NotExportableError(node=error.node, op=op, reason=error.reason) from error
    return _named(model, graph, decomposed.constants)


@lru_cache(maxsize=8)
def _registry(opset: int, translations: Callable[[], Table] | None) -> Registry:
    return Registry(opset, {**standard_table(), **(translations() if translations is not None else {})})


def _named(model: "onnx_ir.Model", graph: fx.Graph, constants: Mapping[str, Tensor]) -> OnnxGraph:
    """Rename a model's inputs and outputs, and turn constants into initializers. Return the model with the names.

    graph: the translated graph. constants: name of a placeholder -> its constant.
    """
    import onnx_ir

    body = model.graph
    placeholders = graph.find_nodes(op="placeholder")
    values = dict(zip((node.name for node in placeholders), list(body.inputs), strict=True))
    _separate(body)
    for name, value in values.items():  # a translation that returns its argument has renamed it
        value.name = name
    for name, tensor in constants.items():
        value = values.pop(name)
        body.inputs.remove(value)
        value.const_value = onnx_ir.tensor(tensor.detach().contiguous(), name=name)
        body.initializers[name] = value
    for index, value in enumerate(body.outputs):
        value.name = f"result_{index}"
    return OnnxGraph(model, tuple(values), tuple(str(value.name) for value in body.outputs))


def _separate(body: "onnx_ir.Graph") -> None:
    """Insert Identity before an output that is also an input or another output, because ONNX does not allow this."""
    import onnx_ir

    taken = set(body.inputs)
    for index, value in enumerate(list(body.outputs)):
        if value in taken:
            copy = onnx_ir.node("Identity", [value])
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            body.append(copy)
            body.outputs[index] = copy.outputs[0]
        taken.add(value)
