"""Two steps between an ONNX model and its session: find safe in-place writes, and build weights into the model."""

from collections.abc import Sequence

from dlinfer.graph.onnx.export import OnnxGraph
from dlinfer.vendor.onnxruntime.feeds import Feed

_SCATTERS = frozenset({"ScatterElements", "ScatterND"})
_ELEMENTWISE = frozenset(
    "Add Sub Mul Div Pow Neg Abs Sqrt Exp Log Sign Where Min Max Relu Sigmoid Tanh Clip Reciprocal Floor Ceil".split()
)


def safe_in_place(graph: OnnxGraph, feeds: Sequence[Feed], writes: Sequence[int | None]) -> frozenset[int]:
    """Return the indices of inputs whose memory the session may overwrite with their new contents while it runs.

    ONNX Runtime does not know that old and new contents share memory, so it does not order or copy reads to protect
    them. An input is therefore safe only if the node that computes its new contents is the only node that reads it.
    This node must also read each element at the place where it writes it.
    writes: for each output of the function, the index of the input whose new contents it is; None for other outputs.
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
    """Return the model with its inputs ``names`` turned into initialisers.

    The model does not contain their values: the session gets the values separately.
    """
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
