"""Decompose the ops of a graph that have no translation to ONNX, one by one.

torch.onnx would retrace the whole graph instead. That takes seconds with symbolic sizes, and also decomposes ops that
have a kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dlinfer.errors import NotExportableError
from dlinfer.graph.ir.dialect import (
    attribute,
    fake,
    gives_something,
    is_size,
    op_name,
    overload,
    schema_name,
    tensors_of,
    written_arguments,
)
from dlinfer.graph.onnx.precision import python_float
from dlinfer.graph.torch_private.fake_mode import mode_of, trace_decomposed
from dlinfer.graph.torch_private.onnx import Registry

_ASSERTIONS = frozenset(
    f"aten::{name}"
    for name in ("_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range_for_size")
)


class Decomposed:
    """A copy of a graph whose ops all have a translation to ONNX.

    The copy has no assertions, because they were checked on fakes. Constants become additional placeholders, after
    those of the graph.
    constants: name of such a placeholder -> its constant.
    Raises NotExportableError, which names a node of ``owner``.
    """

    def __init__(self, owner: fx.GraphModule, registry: Registry) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._registry = registry
        self._copies: dict[fx.Node, Any] = {}
        for node in owner.graph.nodes:
            if node.op == "placeholder":
                self._copy(node)
            elif node.op == "get_attr":
                self._constant(node, attribute(owner, str(node.target)))
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.graph.output(map_arg(node.args[0], self._copies.__getitem__))

    def _copy(self, node: fx.Node) -> None:
        copy = self.graph.node_copy(node, self._copies.__getitem__)
        # The exporter writes everything in a node's meta into the model, and needs the key ``nn_module_stack``.
        copy.meta = {"val": fake(node), "nn_module_stack": {}}
        self._copies[node] = copy

    def _constant(self, node: fx.Node, value: object) -> None:
        """Add a placeholder for a constant, after the other placeholders and before all other nodes."""
        if not isinstance(value, torch.Tensor):
            raise NotExportableError(
                node=node.name, op="get_attr", reason=f"the constant is a {type(value).__name__}"
            )
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(first):
            copy = self.graph.placeholder(f"constant_{len(self.constants)}")
        copy.meta = {"val": value, "nn_module_stack": {}}
        self.constants[copy.name] = value
        self._copies[node] = copy

    def _call(self, node: fx.Node) -> None:
        op = overload(node)
        if schema_name(node) in _ASSERTIONS and not gives_something(node):
            return
        reason = python_float(node)
        if reason is None and self._registry.knows(node.target):
            self._copy(node)
        elif reason is None and op is not None and not is_size(node):
            self._decompose(node)
        else:
            reason = reason or "the op has no translation to ONNX"
            raise NotExportableError(node=node.name, op=op_name(node), reason=reason)

    def _decompose(self, node: fx.Node) -> None:
        traced = self._traced(node, lambda call: call)
        if any(map(written_arguments, traced.graph.nodes)):  # decompositions may write into new tensors
            traced = self._traced(node, lambda call: torch.func.functionalize(call, remove="mutations"))
        inputs = traced.graph.find_nodes(op="placeholder")
        self._copies |= {
            new: self._copies[old] for new, old in zip(inputs, node.all_input_nodes, strict=True)
        }
        for new in traced.graph.nodes:
            if new.op == "get_attr":
                self._constant(new, attribute(traced, str(new.target)))
            elif new.op == "call_function":
                if (reason := python_float(new)) is not None:
                    raise NotExportableError(
                        node=node.name, op=op_name(node), reason=f"in its decomposition, {reason}"
                    )
                if not self._registry.knows(new.target):
                    reason = (
                        f"neither the op nor {op_name(new)} from its decomposition has a translation to ONNX"
                    )
                    raise NotExportableError(node=node.name, op=op_name(node), reason=reason)
                self._copy(new)
        self._copies[node] = map_arg(traced.graph.output_node().args[0], self._copies.__getitem__)

    def _traced(
        self, node: fx.Node, wrap: Callable[[Callable[..., object]], Callable[..., object]]
    ) -> fx.GraphModule:
        """Trace one node after dispatch, with decompositions, and return the graph.

        wrap: takes the function that makes the node's call, and returns the function to trace.
        """
        parents, target = node.all_input_nodes, overload(node)

        def call(*values: Any) -> object:
            assert target is not None
            by_node = dict(zip(parents, values, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), by_node.__getitem__)
            return target(*args, **kwargs)

        tensors = [tensor for relative in (node, *parents) for tensor in tensors_of(relative)]
        table = self._registry.decompositions
        try:
            return trace_decomposed(wrap(call), list(map(fake, parents)), mode_of(tensors), table)
        except Exception as cause:  # whatever it raises on fakes, the reason is what the user needs
            lines = str(cause).strip().splitlines()
            detail = f"{type(cause).__name__}: {lines[0] if lines else ''}"
            reason = f"the op has no translation to ONNX, and its decomposition failed: {detail}"
            raise NotExportableError(node=node.name, op=op_name(node), reason=reason) from cause
