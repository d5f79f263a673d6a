"""Keep float32 in models of a 16-bit type: OpenVINO 2026.4.1 computes float32 in 16 bits too unless a node is marked.

The mark is a runtime attribute. The Python API can neither create nor copy it, but writing the model as text and
reading it again creates it. The plugin's rewrites drop the mark from some products (a transposed operand, a linear
layer with a bias), so the precision of each compiled node is checked.

For bfloat16 the plugin changes the precision of nodes. For float16 it converts the model, and rounds between marked and
unmarked nodes. So in float16 inputs, constants and results need the mark too."""

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from pathlib import Path
from tempfile import TemporaryDirectory

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Node, Output
from torch import fx

from dlinfer.graph.ir.dialect import overload, tensors_of
from dlinfer.vendor.openvino.devices import core

_SHORT = ("bf16", "f16")
_PRECISE = "precise_0"
"""Key of the mark while the model is built. Writing the model as text turns it into ``DisablePrecisionConversion``."""


class Precise:
    """Collects the nodes of a model that compute float32, to mark them when the model is complete."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._inside: set[str] = set()

    def note(self, node: fx.Node, outputs: Collection[Output]) -> None:
        """Record the new nodes of the model that come from an fx node. outputs: the fx node's values in the model.

        Nodes that compute float32 inside an op on 16 bits are kept apart from nodes of float32 ops."""
        tensors = [
            *tensors_of(node),
            *(tensor for parent in node.all_input_nodes for tensor in tensors_of(parent)),
        ]
        dtypes = {tensor.dtype for tensor in tensors}
        new = list(self._new(outputs))
        if torch.float32 not in dtypes and dtypes & {torch.bfloat16, torch.float16}:
            self._inside |= {inner.get_name() for inner in new}
            if _is_pointwise(node):  # a formula, which may cancel
                for inner in new:
                    kept_wide(inner)

    def _new(self, outputs: Collection[Output]) -> Iterator[Node]:
        waiting = [output.get_node() for output in outputs]
        while waiting:
            node = waiting.pop()
            if node.get_name() not in self._seen:
                self._seen.add(node.get_name())
                yield node
                waiting += [port.get_source_output().get_node() for port in node.inputs()]

    def marked(self, model: ov.Model, precision: str) -> tuple[ov.Model, frozenset[str]]:
        """Return two values: the model with its float32 nodes marked, and the names of nodes for ``rounded`` to check.

        precision: the model's 16-bit type.

        An op on 16 bits may compute float32 inside, with numbers beyond float16, such as a sum of squares. For f16 all
        float32 nodes inside such ops are marked; for bf16 only nodes of ``kept_wide`` and of pointwise ops. The names
        leave out all nodes inside such ops, and casts to 16 bits."""
        nodes = [node for node in model.get_ops() if _is_wide(node)]
        outside = [node for node in nodes if node.get_name() not in self._inside]
        inside = [
            node for node in nodes if node.get_name() in self._inside and "f32" in _types(node.outputs())
        ]
        chosen = outside + [node for node in inside if precision == "f16" or _PRECISE in node.get_rt_info()]
        if not chosen:
            return model, frozenset()
        computed = [
            node for node in outside if node.get_type_name() not in ("Constant", "Parameter", "Result")
        ]
        kept = [node for node in computed if _types(node.outputs()).isdisjoint(_SHORT)]
        return _with_marks(model, chosen), frozenset(node.get_friendly_name() for node in kept)


def _is_pointwise(node: fx.Node) -> bool:
    op = overload(node)
    return op is not None and (torch.Tag.pointwise in op.tags or op is torch.ops.aten.log_sigmoid.default)


def kept_wide(node: Node) -> Node:
    """Mark a node to compute float32 inside an op on 16 bits, where rounding errors would accumulate."""
    node.get_rt_info()[_PRECISE] = ""
    return node


def precisely(function: Callable[..., Node], *values: Output) -> Output:
    """Build nodes by ``function`` from ``values``, with the mark on float32 nodes. Return their output."""
    stand_ins = [op.parameter(value.get_partial_shape(), value.get_element_type()) for value in values]
    model = ov.Model([function(*stand_ins)], stand_ins, "precise")  # pyright: ignore[reportGeneralTypeIssues]
    model = _with_marks(model, filter(_is_wide, model.get_ops()))
    for stand_in, value in zip(model.get_parameters(), values, strict=True):
        for reader in stand_in.output(0).get_target_inputs():
            reader.replace_source_output(value)
    return model.get_results()[0].input_value(0)


def rounded(compiled: ov.CompiledModel, model: ov.Model, precise: Collection[str]) -> str | None:
    """Return the first of the ``precise`` nodes that a compiled model rounds to 16 bits; None if it rounds none.

    model: the model that was compiled, with or without weights."""
    if not precise:
        return None
    known = {node.get_friendly_name() for node in model.get_ops()}
    for node in compiled.get_runtime_model().get_ordered_ops():
        layers = _layers(node)
        kept = next((layer for layer in layers if layer in precise), None)
        if kept is None:
            continue
        if layers[-1] in precise and _is_short(node):
            return layers[-1]
        if _info(node, "runtimePrecision") in _SHORT and _rounds(node):
            return kept
        if any(_is_short(source) and _rounds(source) for source in _added(node, known)):
            return kept
    return None


def _with_marks(model: ov.Model, nodes: Iterable[Node]) -> ov.Model:
    """Return the model with the mark on ``nodes``: write it as text and read it again."""
    # Other runtime information is no attribute and would be lost: attention's numbers of heads.
    infos = {node.get_friendly_name(): dict(node.get_rt_info().items()) for node in model.get_ops()}
    for node in nodes:
        node.get_rt_info()[_PRECISE] = ""
    with TemporaryDirectory() as folder:
        text, constants = Path(folder, "model.xml"), Path(folder, "model.bin")
        ov.serialize(model, text, constants)
        read = core().read_model(text.read_bytes(), constants.read_bytes())
    for node in read.get_ops():
        for key, value in infos[node.get_friendly_name()].items():
            if isinstance(value.value, int):
                node.get_rt_info()[key] = value.value
    return read


def _is_wide(node: Node) -> bool:
    return "f32" in _types((*node.inputs(), *node.outputs()))


def _types(ports: Iterable[ov.Input | Output]) -> set[str]:
    return {port.get_element_type().get_type_name() for port in ports}


def _info(node: Node, key: str) -> str:
    infos = node.get_rt_info()
    return infos[key].astype(str) if key in infos else ""


def _layers(node: Node) -> list[str]:
    """Return the names of the model's nodes that a node of the runtime model was fused from, in order."""
    return [layer for layer in _info(node, "originalLayersNames").split(",") if layer]


def _added(node: Node, known: Set[str]) -> Iterator[Node]:
    """Yield the nodes that the plugin itself inserted between nodes of the model and ``node``.

    known: the names of all nodes of the model.
    """
    seen: set[str] = set()
    waiting = [node]
    while waiting:
        for source in _sources(waiting.pop()):
            name = source.get_friendly_name()
            if known.isdisjoint(_layers(source)) and name not in seen:
                seen.add(name)
                waiting.append(source)
                yield source


def _rounds(node: Node) -> bool:
    return not all(map(_is_short, _sources(node)))


def _is_short(node: Node) -> bool:
    """Return whether a node of the runtime model outputs 16 bits."""
    return _info(node, "outputPrecisions").split(",")[0] in _SHORT


def _sources(node: Node) -> Iterator[Node]:
    """Yield the nodes whose floats a node of the runtime model reads.

    The plugin's reorderings between them are skipped.
    """
    for port in node.inputs():
        source = port.get_source_output().get_node()
        while _info(source, "layerType") == "Reorder":
            source = source.input_value(0).get_node()
        if _info(source, "outputPrecisions").split(",")[0] in (*_SHORT, "f32"):
            yield source
