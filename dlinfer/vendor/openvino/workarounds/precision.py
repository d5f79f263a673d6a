"""float32 beside 16 bits, which OpenVINO 2026.4.1 computes in 16 bits too unless each node says that it must not.

A node says so by a runtime attribute that the Python API can neither make nor copy; written as text and read again it
is there. The plugin's own rewriting drops it from some products (a transposed operand, a linear layer with a bias), so
that what was compiled is asked which precision each node got.

For bfloat16 the plugin changes the precision of nodes. For float16 it converts the model, and rounds where a marked
node meets an unmarked one: an input, a constant and a result need the mark too.
"""

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
"""As text it becomes the attribute ``DisablePrecisionConversion``."""


class Precise:
    """The nodes of a model that compute float32, noted while it is written."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._inside: set[str] = set()

    def note(self, node: fx.Node, outputs: Collection[Output]) -> None:
        """Note what an fx node became: ``outputs``, and what is new behind them."""
        tensors = [*tensors_of(node), *(one for given in node.all_input_nodes for one in tensors_of(given))]
        dtypes = {tensor.dtype for tensor in tensors}
        new = list(self._new(outputs))
        if torch.float32 not in dtypes and dtypes & {torch.bfloat16, torch.float16}:
            self._inside |= {one.get_name() for one in new}
            if _is_pointwise(node):  # a formula, which may cancel
                for one in new:
                    kept_wide(one)

    def _new(self, outputs: Collection[Output]) -> Iterator[Node]:
        waiting = [output.get_node() for output in outputs]
        while waiting:
            found = waiting.pop()
            if found.get_name() not in self._seen:
                self._seen.add(found.get_name())
                yield found
                waiting += [one.get_source_output().get_node() for one in found.inputs()]

    def marked(self, model: ov.Model, precision: str) -> tuple[ov.Model, frozenset[str]]:
        """(the model with its float32 nodes marked, the names of these, but for casts to 16 bits).

        precision: that of all other nodes. An op on 16 bits may compute float32 inside, with numbers that float16 does
        not hold, such as a sum of squares: for f16 these nodes are marked too, for bf16 only those of ``kept_wide`` and
        of pointwise ops.
        """
        nodes = [one for one in model.get_ops() if _is_wide(one)]
        outside = [one for one in nodes if one.get_name() not in self._inside]
        inside = [one for one in nodes if one.get_name() in self._inside and "f32" in _types(one.outputs())]
        chosen = outside + [one for one in inside if precision == "f16" or _PRECISE in one.get_rt_info()]
        if not chosen:
            return model, frozenset()
        computed = [one for one in outside if one.get_type_name() not in ("Constant", "Parameter", "Result")]
        kept = [one for one in computed if _types(one.outputs()).isdisjoint(_SHORT)]
        return _with_marks(model, chosen), frozenset(one.get_friendly_name() for one in kept)


def _is_pointwise(node: fx.Node) -> bool:
    op = overload(node)
    return op is not None and (torch.Tag.pointwise in op.tags or op is torch.ops.aten.log_sigmoid.default)


def kept_wide(node: Node) -> Node:
    """A node that is to compute float32 inside of an op on 16 bits, in which its rounding would add up."""
    node.get_rt_info()[_PRECISE] = ""
    return node


def precisely(function: Callable[..., Node], *values: Output) -> Output:
    """The output of the nodes that a function makes for values; each node of float32 is marked."""
    stand_ins = [op.parameter(one.get_partial_shape(), one.get_element_type()) for one in values]
    model = ov.Model([function(*stand_ins)], stand_ins, "precise")  # pyright: ignore[reportGeneralTypeIssues]
    model = _with_marks(model, [one for one in model.get_ops() if _is_wide(one)])
    for stand_in, value in zip(model.get_parameters(), values, strict=True):
        for reader in stand_in.output(0).get_target_inputs():
            reader.replace_source_output(value)
    return model.get_results()[0].input_value(0)


def rounded(compiled: ov.CompiledModel, model: ov.Model, precise: Collection[str]) -> str | None:
    """The first of the ``precise`` nodes whose numbers a compiled model rounds to 16 bits; None where there is none.

    model: what it was compiled from, or the same without weights.
    """
    if not precise:
        return None
    known = {node.get_friendly_name() for node in model.get_ops()}
    for node in compiled.get_runtime_model().get_ordered_ops():
        layers = _layers(node)
        kept = next((one for one in layers if one in precise), None)
        if kept is None:
            continue
        if layers[-1] in precise and _is_short(node):
            return layers[-1]
        if _said(node, "runtimePrecision") in _SHORT and _rounds(node):
            return kept
        if any(_is_short(source) and _rounds(source) for source in _added(node, known)):
            return kept
    return None


def _with_marks(model: ov.Model, nodes: Iterable[Node]) -> ov.Model:
    """The model, written as text and read again with the attribute at some nodes."""
    # What else was said of a node is no attribute, and gets lost: attention's numbers of heads.
    said = {one.get_friendly_name(): dict(one.get_rt_info().items()) for one in model.get_ops()}
    for node in nodes:
        node.get_rt_info()[_PRECISE] = ""
    with TemporaryDirectory() as folder:
        text, constants = Path(folder, "model.xml"), Path(folder, "model.bin")
        ov.serialize(model, text, constants)
        read = core().read_model(text.read_bytes(), constants.read_bytes())
    for node in read.get_ops():
        for key, value in said[node.get_friendly_name()].items():
            if isinstance(value.value, int):
                node.get_rt_info()[key] = value.value
    return read


def _is_wide(node: Node) -> bool:
    return "f32" in _types((*node.inputs(), *node.outputs()))


def _types(ports: Iterable[ov.Input | Output]) -> set[str]:
    return {one.get_element_type().get_type_name() for one in ports}


def _said(node: Node, key: str) -> str:
    said = node.get_rt_info()
    return said[key].astype(str) if key in said else ""


def _layers(node: Node) -> list[str]:
    """The nodes of the model that became one of a runtime model, in their order."""
    return [one for one in _said(node, "originalLayersNames").split(",") if one]


def _added(node: Node, known: Set[str]) -> Iterator[Node]:
    """Nodes that the plugin itself put in front of one."""
    for source in _sources(node):
        if known.isdisjoint(_layers(source)):
            yield source
            yield from _added(source, known)


def _rounds(node: Node) -> bool:
    return not all(map(_is_short, _sources(node)))


def _is_short(node: Node) -> bool:
    """Whether what a node of a runtime model gives has 16 bits."""
    return _said(node, "outputPrecisions").split(",")[0] in _SHORT


def _sources(node: Node) -> Iterator[Node]:
    """Where the floats that a node of a runtime model reads come from, before the plugin converted them."""
    for port in node.inputs():
        source = port.get_source_output().get_node()
        while _said(source, "layerType") == "Reorder":
            source = source.input_value(0).get_node()
        if _said(source, "outputPrecisions").split(",")[0] in (*_SHORT, "f32"):
            yield source
