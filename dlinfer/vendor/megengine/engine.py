"""The graph engine ``megengine``: a region becomes a node list, that a MegEngine model, and that a Lite network."""

import operator
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dlinfer.errors import CompileOptionError, NotAFunctionError
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.engine_kit.eager_region import eager_region
from dlinfer.graph.engine_kit.torch_steps import TorchSteps
from dlinfer.graph.functional.function import function_of, refusal
from dlinfer.graph.ir.dialect import fake, is_compute, is_size, tensors_of, written_arguments
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.vendor.megengine import translations
from dlinfer.vendor.megengine.building import model_of
from dlinfer.vendor.megengine.errors import LiteBuildError, LiteError
from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value, placeholder
from dlinfer.vendor.megengine.region import RegionRun
from dlinfer.vendor.megengine.translations.table import truth

NAME = "megengine"
SMALLEST = 2
"""Nodes that compute which are worth a network of their own."""


class MegEngineEngine(TorchSteps):
    """Regions through MegEngine Lite."""

    name = NAME
    passes: Sequence[Pass] = ()
    phases_alike = False
    stored_options: Collection[str] = ()
    concurrent = True  # calls of one region take turns

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise CompileOptionError for another option than ``num_threads``, or a value that it does not take."""
        _threads(options)

    def refuses(self, node: fx.Node) -> str | None:
        """Writes, types and sizes that MegEngine has not, and ops without a translation."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:  # one result of a node, which stays with it
            return self.refuses(node.all_input_nodes[0])
        if written_arguments(node):
            return "it writes, and a network's results are new tensors"
        reason = refusal(node)
        if reason is not None:
            return reason
        if is_size(node):
            return "arithmetic on sizes that change between calls (dynamic=False fixes them)"
        return translations.refusal(node) if tensors_of(node) else None

    def entry_cost(self, nodes: Sequence[fx.Node]) -> str | None:
        """A single node is as well run by torch."""
        count = sum(map(is_compute, nodes))
        return f"{count} nodes are too few for a network of their own" if count < SMALLEST else None

    def compile(self, region: Subgraph, options: CompileOptions) -> CompiledRegion:
        """The region as a network. What MegEngine refuses after all runs by torch, under the fallback policy.

        Raises GraphFallbackError under the policy ``error``, and ToolchainMissingError.
        """
        try:
            function = function_of(region)
            graph = written(function.graph_module)
            if not graph.outputs:
                return eager_region(region, self.name, options, "it computes nothing")
            results: Any = function.graph_module.graph.output_node().args[0]
            dtypes = [fake(node).dtype for node in results]
            threads = _threads(options.wanted_engine_options)
            run = RegionRun(function, graph, model_of(graph), dtypes, threads)
        except (NotAFunctionError, UntranslatableError, LiteBuildError, LiteError) as error:
            return eager_region(region, self.name, options, str(error))
        computing = [node for node in region.graph_module.graph.nodes if is_compute(node)]
        placement = {node.name: f"network of {len(graph.nodes)} nodes" for node in computing}
        return CompiledRegion(run, placement)

    def identity(self, cache_dir: Path) -> str:
        """Nothing that is stored depends on the toolchain."""
        return ""


def written(graph_module: fx.GraphModule) -> NodeList:
    """A function's graph as a node list. Raises UntranslatableError."""
    writer, known = NodeList(), {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            if node.users:
                known[node] = placeholder(writer, node)
        elif node.op == "call_function":
            known[node] = translations.translate(writer, node, known.__getitem__)
        elif node.op != "output":
            raise UntranslatableError(f"a node of kind {node.op}")
    results: Any = graph_module.graph.output_node().args[0]
    for node in results:
        writer.outputs.append(_result(writer, known[node]).name)
    return writer


def _result(writer: NodeList, value: Value) -> Value:
    """A result as a node of its own, which inputs and results given twice are not; bool as bytes."""
    if value.dtype == torch.bool:
        return writer.op("cast", truth(writer, value), like=value, to="uint8")
    return writer.op("reshape", value, like=value, shape=list(value.shape))


def _threads(options: Mapping[str, Any]) -> int:
    for name, value in options.items():
        if name != "num_threads":
            raise CompileOptionError(option=f"engine_options[{name!r}]", given=value, expected="num_threads")
        if not isinstance(value, int) or value < 0:
            expected = "a number of threads, 0 for torch's"
            raise CompileOptionError(option="engine_options['num_threads']", given=value, expected=expected)
    return options.get("num_threads", 0) or torch.get_num_threads()
