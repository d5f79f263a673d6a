"""A linear layer with a 4-bit weight.

The lowering unpacks the weight's words by arithmetic, which is right for any weight. It names the nodes of the unpacked
numbers and zero points after the input that holds the words. If this input becomes a constant, ``weights.with_weights``
replaces these nodes by 4-bit constants, which the CPU plugin keeps in 4 bits."""

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.matrix import linear
from dlinfer.vendor.openvino.registry import Call, lowers
from dlinfer.vendor.openvino.weights import packed_name

dlinfer = torch.ops.dlinfer


def _whole_groups(call: Call) -> str | None:
    sizes = [*call.fake("qweight").shape, *call.fake("scales").shape]
    if any(fixed_size(size) is None for size in sizes):
        return "the size of the packed weight is not fixed"
    if not all(fixed_size(size) for size in sizes):
        return "the packed weight has no elements: the CPU plugin would end the process"
    size = call.arguments["group_size"]
    return "the last group of the packed weight is shorter" if size and int(sizes[0]) % size else None


@lowers(dlinfer.weight_quant_matmul.default, refuses=_whole_groups)
def weight_quant_matmul(
    b: Builder,
    x: Output,
    qweight: Output,
    scales: Output,
    offset: Output | None,
    bias: Output | None,
    group_size: int,
) -> Output:
    groups, out_features = (int(size) for size in b.call.fake("scales").shape)
    size = group_size or int(b.call.fake("qweight").shape[0])
    numbers = _rows(b, qweight, groups, size, out_features)
    eight = b.scalar(float(AWQ.middle), ov.Type.f32)
    zeros = eight if offset is None else _rows(b, offset, groups, 1, out_features)
    wide = op.unsqueeze(op.transpose(b.cast(scales, ov.Type.f32), b.axes([1, 0])), b.axes([2]))
    whole = op.multiply(op.subtract(numbers, zeros), wide)
    weight = op.reshape(whole, b.axes([out_features, groups * size]), False).output(0)
    # After a conversion to 16 bits the plugin would not recognise a packed weight, and widen all of it at each call.
    wide_bias = None if bias is None else b.cast(bias, ov.Type.f32)
    return b.cast(linear(b, b.cast(x, ov.Type.f32), weight, wide_bias), b.kind)


def _rows(b: Builder, words: Output, groups: int, size: int, out_features: int) -> Output:
    """Unpack words [groups * size, out_features / 8] to float32 [out_features, groups, size].

    If the words are an input, the result's node gets a name that ``weights.with_weights`` finds."""
    parts = []
    for which in range(AWQ.per_word):
        place = b.scalar(AWQ.order.index(which) * AWQ.bits, ov.Type.i32)
        part = op.bitwise_and(op.bitwise_right_shift(words, place), b.scalar(15, ov.Type.i32))
        parts.append(op.unsqueeze(part, b.axes([2])).output(0))
    numbers = op.convert(op.concat(parts, 2), ov.Type.f32)
    by_group = op.reshape(numbers, b.axes([groups, size, out_features]), False)
    node = op.transpose(by_group, b.axes([2, 0, 1]))
    if words.get_node().get_type_name() == "Parameter":
        node.set_friendly_name(packed_name(words.get_node().get_friendly_name(), groups, size))
    return node.output(0)
