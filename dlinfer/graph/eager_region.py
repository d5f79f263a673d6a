"""A region that its engine could not compile after all: torch's kernels one by one, under the fallback policy."""

from collections.abc import Mapping

from dlinfer.graph import callee
from dlinfer.graph.dialect import is_compute, is_size
from dlinfer.graph.engine import CompiledRegion
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.policy import leave_engine
from dlinfer.graph.program import Program, Step, constants_of, refer


def eager_region(
    region: Subgraph,
    engine: str,
    options: CompileOptions,
    reason: str,
    reasons: Mapping[str, str] | None = None,
) -> CompiledRegion:
    """The region as a program of eager steps, each node that computes refused with its reason.

    reason: of the region. reasons: node name -> one of its own. Raises GraphFallbackError under the policy ``error``,
    for a node with a reason of its own before others.
    """
    own = reasons or {}
    graph = region.graph_module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    computing = [node for node in calls if is_compute(node)]
    refused = {}
    for node in sorted(computing, key=lambda node: node.name not in own):
        refused[node.name] = own.get(node.name, reason)
        leave_engine(node, engine, refused[node.name], options.policy)
    kinds = {node: "eager" if node.name in refused else "size" if is_size(node) else "view" for node in calls}
    steps = [Step.of(node, kinds[node], callee.reference(node.target)) for node in calls]
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    output = refer(graph.output_node().args[0])
    name, constants = region.graph_module._get_name(), constants_of(region.graph_module)
    return CompiledRegion(Program(name, inputs, steps, output, callee.resolve, constants), refused=refused)
