"""Keep OpenVINO 2026.4.1 from fusing attention wrongly with the ops around it.

The CPU plugin fuses scores, softmax and product with transpositions on all sides and with later elementwise ops, up to
the next matrix product. This goes wrong in three cases:

- There are as many heads as tokens. The results are wrong.
- The attention's result, or the result of a later elementwise op, has two readers. The process crashes.
- Sizes are fixed, and a later elementwise op reads another tensor, for example attention(q, k, v) / x. The process
  crashes if this op divides, compares or follows a transposition.

A roll by 0 stops the fusion, since no pass folds it. The roll costs a copy."""

import openvino as ov
import openvino.opset16 as op
from openvino import Input, Node, Output

_ENDS = ("MatMul", "Result")
_OPERANDS = 3  # queries, keys and values
_FUSED = ("Add", "Convert", "Divide", "Multiply", "Reshape", "Select", "Subtract", "Transpose")


def part_attention(model: ov.Model) -> None:
    """Insert a roll between attention and the ops that the plugin would fuse wrongly with it; mutates the model."""
    for node in model.get_ordered_ops():
        if not _is_attention(node):
            continue
        square = _is_square(node)
        if square or _forks(node) or (_is_fixed(node) and _joins(node)):
            _part(node.output(0), list(node.output(0).get_target_inputs()))
        if square:
            for operand in node.inputs()[:_OPERANDS]:
                _part(operand.get_source_output(), [operand])


def _part(value: Output, readers: list[Input]) -> None:
    nowhere = op.constant([0], ov.Type.i64)
    parted = op.roll(value, nowhere, nowhere).output(0)
    for reader in readers:
        reader.replace_source_output(parted)


def _is_attention(node: Node) -> bool:
    if node.get_type_name() == "ScaledDotProductAttention":
        return True
    return node.get_type_name() == "MatMul" and _from_softmax(node.input_value(0))


def _from_softmax(value: Output) -> bool:
    node = value.get_node()
    while node.get_type_name() in _FUSED:
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Softmax"


def _is_square(node: Node) -> bool:
    shape = node.get_output_partial_shape(0)
    return len(shape) > 2 and shape[-3].is_static and shape[-3] == shape[-2]


def _forks(node: Node) -> bool:
    """Return whether a node, or some op between the node and the next matrix product, has two readers."""
    readers = [port.get_node() for output in node.outputs() for port in output.get_target_inputs()]
    fused = [reader for reader in readers if reader.get_type_name() not in _ENDS]
    return bool(fused) and (len(readers) > 1 or any(map(_forks, fused)))


def _is_fixed(node: Node) -> bool:
    return node.get_output_partial_shape(0).is_static


def _joins(node: Node) -> bool:
    """Return whether an op behind a node, before the next matrix product, also reads another float tensor."""
    for reader in node.output(0).get_target_inputs():
        behind = reader.get_node()
        if behind.get_type_name() in _ENDS:
            continue
        others = [
            port.get_source_output() for port in behind.inputs() if port.get_index() != reader.get_index()
        ]
        values = [value for value in others if value.get_element_type().is_real()]
        if any(value.get_node().get_type_name() != "Constant" for value in values) or _joins(behind):
            return True
    return False
