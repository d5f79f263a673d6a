"""An analysis of a model, and changes to it, before a session is made of it."""

from collections.abc import Sequence

from dlinfer.graph.onnx.export import OnnxGraph
from dlinfer.vendor.onnxruntime.feeds import Feed

_SCATTERS = frozenset({"ScatterElements", "ScatterND"})
_ELEMENTWISE = frozenset(
    "Add Sub Mul Div Pow Neg Abs Sqrt Exp Log Sign Where Min Max Relu Sigmoid Tanh Clip Reciprocal Floor Ceil".split()
)


def safe_in_place(graph: OnnxGraph, feeds: Sequence[Feed], writes: Sequence[int | None]) -> frozenset[int]:
    """Return the indices of inputs whose new contents may overwrite their memory while the session runs.

    This is safe if only the node that computes the new contents reads the input, and reads each element where it writes
    it. ONNX Runtime does not know that both are the same memory: it neither reorders nor copies for this.
    """
    inputs = {feed.index: value for feed, value in zip(feeds, graph.model.graph.inputs, strict=True)}
    safe: set[int] = set()
    for index, content in zip(writes, graph.model.graph.outputs, strict=True):
        node = content.producer() if index in inputs else None
        if index is None or node is None:
            continue
        uses = [use for use in inputs[index].uses() if use.node.op_type != "Shape"]  # it reads no element
        alone = len(uses) == 1 and uses[0].node is node
        if not alone:
            continue
        first = uses[0].idx == 0
        if (node.op_type in _SCATTERS and first) or node.op_type in _ELEMENTWISE:
            safe.add(index)
    return frozenset(safe)


def with_initialisers(graph: OnnxGraph, names: Sequence[str]) -> bytes:
    """Return the model with the inputs ``names`` as initialisers, whose contents the session gets separately."""
    from onnx import ModelProto, TensorProto

    model = ModelProto.FromString(graph.to_bytes())
    held = set(names)
    inputs = list(model.graph.input)
    del model.graph.input[:]
    for value in inputs:
        if value.name not in held:
            model.graph.input.append(value)
            continue
        kind = value.type.tensor_type
        tensor = TensorProto(name=value.name, data_type=kind.elem_type, data_location=TensorProto.EXTERNAL)
        tensor.dims.extend(dim.dim_value for dim in kind.shape.dim)
        tensor.external_data.add(key="location", value=value.name)
        model.graph.initializer.append(tensor)
    return model.SerializeToString()
