"""Decompose the ops of a graph that have no translation to ONNX, one by one.

torch.onnx re-traces the whole graph, which takes seconds with symbolic sizes and decomposes ops that have a kernel.
"""

from collections.abc import Callable, Mapping

import torch
from torch import fx
from torch.fx.node import Argument, map_arg

from dlinfer.errors import NotExportableError
from dlinfer.graph.ir.dialect import (
    fake,
    gives_something,
    is_size,
    op_name,
    overload,
    tensors_of,
    written_arguments,
)
from dlinfer.graph.ir.program import attribute
from dlinfer.graph.onnx.precision import python_float
from dlinfer.graph.torch_private.fake_mode import mode_of, trace_decomposed
from dlinfer.graph.torch_private.onnx import Registry

_ASSERTIONS = frozenset(
    f"aten::{name}"
    for name in ("_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range_for_size")
)


def in_known_ops(
    graph_module: fx.GraphModule, registry: Registry
) -> tuple[fx.Graph, Mapping[str, torch.Tensor]]:
    """(a copy of the graph in which every op has a translation, its constants by the name of their placeholder).

    Constants become placeholders after the others. Assertions that fakes have checked are dropped.
    Raises NotExportableError, naming the node of ``graph_module``.
    """
    return _Writer(graph_module, registry).written()


class _Writer:
    def __init__(self, owner: fx.GraphModule, registry: Registry) -> None:
        self.owner = owner
        self.registry = registry
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def written(self) -> tuple[fx.Graph, Mapping[str, torch.Tensor]]:
        nodes = list(self.owner.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._copy(node)
        for node in nodes:
            if node.op == "get_attr":
                self._constant(node, attribute(self.owner, str(node.target)))
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.graph.output(map_arg(node.args[0], self.copies.__getitem__))
        return self.graph, self.constants

    def _copy(self, node: fx.Node) -> None:
        copy = self.graph.node_copy(node, self.copies.__getitem__)
        # The exporter writes all that it finds in a node's meta into the model, and misses the stack of modules.
        copy.meta = {"val": fake(node), "nn_module_stack": {}}
        self.copies[node] = copy

    def _constant(self, node: fx.Node, value: object) -> None:
        """Add a placeholder for a constant, before all other nodes."""
        if not isinstance(value, torch.Tensor):
            raise NotExportableError(
                node=node.name, op="get_attr", reason=f"a constant {type(value).__name__}"
            )
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with self.graph.inserting_before(first):
            copy = self.graph.placeholder(f"constant_{len(self.constants)}")
        copy.meta = {"val": value, "nn_module_stack": {}}
        self.constants[copy.name] = value
        self.copies[node] = copy

    def _call(self, node: fx.Node) -> None:
        op = overload(node)
        if op is not None and not gives_something(node) and op._schema.name in _ASSERTIONS:
            return
        if (reason := python_float(node)) is not None:
            raise NotExportableError(node=node.name, op=op_name(node), reason=reason)
        if self.registry.knows(node.target):
            self._copy(node)
        elif op is None or is_size(node):
            raise NotExportableError(node=node.name, op=op_name(node), reason="it has no translation to ONNX")
        else:
            self._decomposed(node)

    def _decomposed(self, node: fx.Node) -> None:
        traced = self._traced(node, lambda call: call)
        if any(
            written_arguments(new) for new in traced.graph.nodes
        ):  # decompositions may write into what they made
            traced = self._traced(node, lambda call: torch.func.functionalize(call, remove="mutations"))
        inner = dict(zip(traced.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
        copies: dict[fx.Node, fx.Node] = {new: self.copies[old] for new, old in inner.items()}
        outer, self.copies = self.copies, copies
        for new in traced.graph.nodes:
            if new.op == "get_attr":
                self._constant(new, attribute(traced, str(new.target)))
            elif new.op == "call_function":
                if (reason := python_float(new)) is not None:
                    raise NotExportableError(node=node.name, op=op_name(node), reason=f"decomposed, {reason}")
                if not self.registry.knows(new.target):
                    reason = f"neither it nor {op_name(new)}, which it is made of, has a translation to ONNX"
                    raise NotExportableError(node=node.name, op=op_name(node), reason=reason)
                self._copy(new)
        self.copies = outer
        result = traced.graph.output_node().args[0]
        self.copies[node] = map_arg(result, copies.__getitem__)  # pyright: ignore[reportArgumentType]

    def _traced(
        self, node: fx.Node, wrap: Callable[[Callable[..., object]], Callable[..., object]]
    ) -> fx.GraphModule:
        """Trace one node after dispatch, with decompositions."""
        parents = node.all_input_nodes

        def call(*values: Argument) -> object:
            given = dict(zip(parents, values, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
            return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

        fakes = [fake(parent) for parent in parents]
        tensors = [tensor for one in (node, *parents) for tensor in tensors_of(one)]
        try:
            return trace_decomposed(wrap(call), fakes, mode_of(tensors), self.registry.decompositions)
        except Exception as cause:  # whatever it raises on fakes, the reason is what the user needs
            lines = str(cause).strip().splitlines()
            detail = f"{type(cause).__name__}: {lines[0] if lines else ''}"
            reason = f"it has no translation to ONNX, nor a decomposition: {detail}"
            raise NotExportableError(node=node.name, op=op_name(node), reason=reason) from cause
