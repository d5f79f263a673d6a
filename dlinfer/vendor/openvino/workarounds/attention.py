"""Attention that OpenVINO 2026.4.1 fuses wrongly with what is around it.

The CPU plugin makes one node of scores, softmax and product, of transpositions on all sides and of elementwise ops
behind. With as many heads as tokens its numbers are wrong. The process ends where it, or an op behind it, is read
twice, and with fixed sizes where an op behind it reads another tensor too: where they are compared or divided, or
transposed before. It takes nothing from beyond a roll by no places, which no pass folds, and which copies.
"""

import openvino as ov
import openvino.opset16 as op
from openvino import Input, Node, Output

_ENDS = ("MatMul", "Result")
_OPERANDS = 3  # queries, keys and values
_FUSED = ("Add", "Convert", "Divide", "Multiply", "Reshape", "Select", "Subtract", "Transpose")


def part_attention(model: ov.Model) -> None:
    """Put attention apart from what is around it, where it would be fused wrongly; in place."""
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
    """Whether a node, or something that is computed of it, is read twice before the next product."""
    readers = [one.get_node() for output in node.outputs() for one in output.get_target_inputs()]
    fused = [one for one in readers if one.get_type_name() not in _ENDS]
    return bool(fused) and (len(readers) > 1 or any(_forks(one) for one in fused))


def _is_fixed(node: Node) -> bool:
    return node.get_output_partial_shape(0).is_static


def _joins(node: Node) -> bool:
    """Whether something that is computed of a node is computed of another tensor too, before the next product."""
    for reader in node.output(0).get_target_inputs():
        behind = reader.get_node()
        if behind.get_type_name() in _ENDS:
            continue
        others = [one.get_source_output() for one in behind.inputs() if one.get_index() != reader.get_index()]
        values = [one for one in others if one.get_element_type().is_real()]
        if any(one.get_node().get_type_name() != "Constant" for one in values) or _joins(behind):
            return True
    return False
