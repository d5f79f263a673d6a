"""Find out which nodes an ONNX runtime supports: export each kind of node alone, once, and pass it to the runtime.

A kind is an op with its arguments, and the dtypes, sizes and strides of its tensors. So all layers of a model share
their kinds.
"""

import operator
import threading
from collections.abc import Callable

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dlinfer.errors import NotAFunctionError, NotExportableError
from dlinfer.graph.functional.functionalize import function_of
from dlinfer.graph.ir.dialect import (
    STATIC,
    Bare,
    arguments,
    fake,
    is_size,
    overload,
    tensors_of,
    written_arguments,
)
from dlinfer.graph.ir.extract import Subgraph
from dlinfer.graph.onnx.export import OPSET, export
from dlinfer.graph.onnx.precision import short_numbers
from dlinfer.graph.onnx.translations.writing import Table
from dlinfer.graph.torch_private.onnx import onnx_type
from dlinfer.graph.torch_private.symbols import SYMBOL
from dlinfer.ops.attention.kv_cache import kv_order


def no_type_of_onnx(dtype: torch.dtype) -> str | None:
    """Return a text that says that ONNX does not support a dtype; None if ONNX supports it."""
    if dtype.is_complex or onnx_type(dtype) is None:
        return f"ONNX tensors cannot have the dtype {str(dtype).removeprefix('torch.')}"
    return None


def fault_by_onnx(model: bytes) -> str | None:
    """Return the reason why ONNX's checker refuses a model, given as bytes; None if the checker accepts it."""
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)  # pyright: ignore[reportUnknownMemberType]
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return f"its translation is not valid ONNX: {' '.join(str(error).split())[:300]}"
    return None


class Refusals:
    """Cached answers: whether the exporter and a runtime support a kind of node. Threads may share one object.

    opset: the models' opset.
    translations: returns torch op -> translation. These translations are preferred to the standard ones; see
        ``export``.
    fault: takes a model as bytes. It returns the reason why the runtime refuses the model, or None.
    """

    def __init__(
        self,
        *,
        opset: int = OPSET,
        translations: Callable[[], Table] | None = None,
        fault: Callable[[bytes], str | None] = fault_by_onnx,
    ) -> None:
        self._opset = opset
        self._translations = translations
        self._fault = fault
        self._answers: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def of(self, node: fx.Node) -> str | None:
        """Return a reason not to export a call; None if it is supported. The call must have a functional form."""
        key = f"{kind(node)} {_cache_order(node)}"
        with self._lock:
            if key not in self._answers:
                self._answers[key] = self._tried(node)
            return self._answers[key]

    def _tried(self, node: fx.Node) -> str | None:
        try:
            alone = _alone(node)
            # A view is exported as it is, because ``function_of`` would leave it to torch.
            written = bool(written_arguments(node))
            graph_module = function_of(alone).graph_module if written else alone.graph_module
            model = export(graph_module, opset=self._opset, translations=self._translations)
        except (NotAFunctionError, NotExportableError) as error:
            return str(error.fields["reason"])
        return short_numbers(node, model.model) or self._fault(model.to_bytes())


def _cache_order(node: fx.Node) -> str:
    """Return the layout of a node's KV caches; empty if it has none. A translation may exist for some layouts only."""
    op = overload(node)
    cache = arguments(node).get("k_cache") if op is not None else None
    return kv_order(fake(cache).device.type) if isinstance(cache, fx.Node) else ""


def kind(node: fx.Node) -> str:
    """Return a node's kind as text, which does not depend on the names of nodes and symbols."""
    names: dict[fx.Node, str] = {}

    def shown(parent: fx.Node) -> str:
        names.setdefault(parent, f"%{len(names)}:{_shown(fake(parent))}")
        return Bare(names[parent])

    text = f"{node.target} {map_arg((node.args, dict(node.kwargs)), shown)} {_shown(fake(node))}"
    symbols: dict[str, str] = {}
    return SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"s_{len(symbols)}"), text)


def _shown(value: object) -> str:
    leaves = pytree.tree_leaves(value)
    return ", ".join(
        f"{leaf.dtype}{tuple(leaf.shape)}{leaf.stride()}" if isinstance(leaf, torch.Tensor) else str(leaf)
        for leaf in leaves
    )


def _alone(node: fx.Node) -> Subgraph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for parent in node.all_input_nodes:
        copies[parent] = graph.placeholder(parent.name)
        copies[parent].meta = {"val": fake(parent), STATIC: False}
    copy = graph.node_copy(node, copies.__getitem__)
    outputs: list[fx.Node] = [copy]
    if isinstance(fake(node), (list, tuple)):
        outputs = []
        for index, value in enumerate(fake(node)):
            if isinstance(value, torch.Tensor):
                item = graph.call_function(operator.getitem, (copy, index))
                item.meta = {"val": value}
                outputs.append(item)
    elif not tensors_of(node) and not is_size(node):
        outputs = []  # it writes, and returns nothing
    graph.output(tuple(outputs))
    return Subgraph(fx.GraphModule({}, graph, "alone"), tuple(node.all_input_nodes), tuple(outputs))
