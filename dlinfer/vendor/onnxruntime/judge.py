"""Which nodes the engine takes: each kind is written as a model of its own and shown to ONNX Runtime, once.

The exporter and the runtime know best what they serve, so they are asked; what they answer is the reason. Kinds are
told apart by op, arguments and the dtypes and sizes of tensors, so that the layers of a model ask once.
"""

import operator
import re
import threading
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dlinfer.errors import NotAFunctionError, NotExportableError
from dlinfer.graph import values
from dlinfer.graph.dialect import STATIC, fake, is_size, overload, tensors_of, written_arguments
from dlinfer.graph.extract import Subgraph
from dlinfer.graph.onnx.export import export
from dlinfer.graph.torch_onnx_seam import onnx_type
from dlinfer.graph.torch_seam import HigherOrderOperator
from dlinfer.vendor.onnxruntime import sessions
from dlinfer.vendor.onnxruntime.contrib import table

OPSET = 20


class Judge:
    """Answers of the exporter and the runtime, kept. Threads may ask at once."""

    def __init__(self) -> None:
        self._answers: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def refuses(self, node: fx.Node) -> str | None:
        """Why a node is not taken; None when it is."""
        if node.op != "call_function":
            return None
        if isinstance(node.target, HigherOrderOperator):
            return f"{node.target} is a higher-order op"
        reason = _unfit_tensor(node)
        if reason is not None:
            return reason
        if node.target is operator.getitem:
            return self.refuses(node.all_input_nodes[0]) if node.all_input_nodes else None
        reason = values.refusal(node)
        if reason is not None or (overload(node) is not None and not tensors_of(node)):
            return reason or self._of_number(node)
        return self._asked(node)

    def _of_number(self, node: fx.Node) -> str | None:
        """Sizes are computed by the exporter's own ops; checks are run by torch before the session."""
        return None if not is_size(node) else self._asked(node)

    def _asked(self, node: fx.Node) -> str | None:
        key = _kind(node)
        with self._lock:
            if key not in self._answers:
                self._answers[key] = _tried(node)
            return self._answers[key]


def _unfit_tensor(node: fx.Node) -> str | None:
    for one in (node, *node.all_input_nodes):
        for tensor in tensors_of(one):
            if tensor.device.type != "cpu":
                return f"a tensor on device {tensor.device.type!r}"
            if tensor.layout != torch.strided:
                return f"a tensor of layout {tensor.layout}"
            if tensor.dtype == torch.bfloat16:
                return "bfloat16: ONNX Runtime's CPU provider has kernels for a few ops only"
            if tensor.dtype.is_complex or onnx_type(tensor.dtype) is None:
                return f"{str(tensor.dtype).removeprefix('torch.')} is no type of ONNX Runtime's tensors"
    return None


_SYMBOL = re.compile(r"\b[suz]\d+\b")


def _kind(node: fx.Node) -> str:
    """A node as text that is equal for nodes that differ in names of nodes and symbols only."""
    names: dict[fx.Node, str] = {}

    def shown(parent: fx.Node) -> Any:
        names.setdefault(parent, f"%{len(names)}:{_shown(fake(parent))}")
        return _Named(names[parent])

    text = f"{node.target} {map_arg((node.args, dict(node.kwargs)), shown)} {_shown(fake(node))}"
    symbols: dict[str, str] = {}
    return _SYMBOL.sub(lambda found: symbols.setdefault(found.group(), f"s_{len(symbols)}"), text)


class _Named(str):
    def __repr__(self) -> str:
        return str(self)


def _shown(value: Any) -> str:
    leaves = pytree.tree_leaves(value)
    return ", ".join(
        f"{leaf.dtype}{tuple(leaf.shape)}{leaf.stride()}" if isinstance(leaf, torch.Tensor) else str(leaf)
        for leaf in leaves
    )


def _tried(node: fx.Node) -> str | None:
    try:
        alone = _alone(node)
        # A view is asked for too, though ``function_of`` leaves it to torch where nothing is computed.
        written = bool(written_arguments(node))
        graph_module = values.function_of(alone).graph_module if written else alone.graph_module
        graph = export(graph_module, opset=OPSET, translations=table)
    except (NotAFunctionError, NotExportableError) as error:
        return str(error.fields["reason"])
    return sessions.why_refused(graph.to_bytes())


def _alone(node: fx.Node) -> Subgraph:
    """A region of one node, and of the results that are taken from it."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for parent in node.all_input_nodes:
        copies[parent] = graph.placeholder(parent.name)
        copies[parent].meta = {"val": fake(parent), STATIC: False}
    copy = graph.node_copy(node, copies.__getitem__)
    outputs = [copy]
    if isinstance(fake(node), (list, tuple)):
        outputs = []
        for index, value in enumerate(fake(node)):
            if isinstance(value, torch.Tensor):
                item = graph.call_function(operator.getitem, (copy, index))
                item.meta = {"val": value}
                outputs.append(item)
    graph.output(tuple(outputs))
    return Subgraph(fx.GraphModule({}, graph, "alone"), tuple(node.all_input_nodes), tuple(outputs))
