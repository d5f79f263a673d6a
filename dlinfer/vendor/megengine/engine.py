"""The graph engine ``megengine``: a region becomes a node list, then a MegEngine model that Lite runs as a network."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dlinfer.graph.engine_kit.options import EngineOptions, option, whole
from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.engine_kit.value_engine import ValueEngine
from dlinfer.graph.engine_kit.value_region import Lowered
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import is_size
from dlinfer.vendor.megengine import translations
from dlinfer.vendor.megengine.building import model_of
from dlinfer.vendor.megengine.errors import LiteBuildError, LiteError
from dlinfer.vendor.megengine.network import Network
from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value, placeholder, unfit
from dlinfer.vendor.megengine.translations.table import reshaped, truth


@dataclass(frozen=True)
class MegEngineOptions(EngineOptions):
    """num_threads: the number of CPU threads that each region's network uses; 0 means torch's number."""

    num_threads: int = option(0, whole(0, "a number of threads, or 0 for torch's number"))


class MegEngineEngine(ValueEngine[MegEngineOptions]):
    """Runs regions of a graph in MegEngine Lite."""

    name = "megengine"
    options_type = MegEngineOptions
    stored_options: Collection[str] = ()
    concurrent = True  # calls of one region take turns
    refuses_writes = "it writes into a tensor, but a network only returns new tensors"
    smallest = 2

    def refuses_tensor(self, tensor: Tensor) -> str | None:
        """Return a reason to refuse a tensor with this dtype and these sizes; None if MegEngine takes it."""
        return super().refuses_tensor(tensor) or unfit(tensor)

    def refuses_op(self, node: fx.Node) -> str | None:
        if is_size(node):
            return "it computes with sizes that change between calls (dynamic=False fixes them)"
        return translations.refusal(node)

    def lower(self, function: Function, options: MegEngineOptions, policy: str) -> Lowered:
        """Build a model of the function; the function's weights become inputs. Raises ToolchainMissingError.

        policy: the fallback policy, which has no effect here.
        """
        return MegEngineLowered(function, options.num_threads or torch.get_num_threads())


class MegEngineLowered(Lowered):
    """A region as a node list, and the MegEngine model built from the list.

    The region's weights are inputs of the model. The network reads them in torch's memory."""

    def __init__(self, function: Function, threads: int) -> None:
        super().__init__(function)
        self._threads = threads
        self._graph = graph = written(function.graph_module)
        self.placement = f"network of {len(graph.nodes)} nodes"
        self.source = str(graph)
        try:
            self._model = model_of(graph)
        except (LiteBuildError, LiteError) as error:
            raise RefusedError(str(error)) from error

    def compile(self, weights: tuple[Tensor, ...]) -> Network:
        try:
            return Network(self.function, self._graph, self._model, self._threads)
        except LiteError as error:
            raise RefusedError(str(error)) from error


def written(graph_module: fx.GraphModule) -> NodeList:
    """Return a function's graph as a node list. Raises UntranslatableError for a node that has no translation."""
    writer, values = NodeList(), {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            if node.users:
                values[node] = placeholder(writer, node)
        elif node.op == "call_function":
            values[node] = translations.translate(writer, node, values.__getitem__)
        elif node.op != "output":
            raise UntranslatableError(f"the graph has a node of kind {node.op}")
    results: Any = graph_module.graph.output_node().args[0]
    writer.outputs = [_result(writer, values[node]).name for node in results]
    return writer


def _result(writer: NodeList, value: Value) -> Value:
    """Add a node that copies ``value``, since a result may not be an input or another result. bool becomes bytes."""
    if value.dtype == torch.bool:
        return writer.op("cast", truth(writer, value), like=value, to="uint8")
    return reshaped(writer, value, value.shape)
