"""Weights as constants of a model: on torch's own memory, or compressed to 8 or 4 bits.

A compressed weight is three nodes: integers, a conversion, and a product with scales. The CPU plugin recognises these
nodes before a linear layer and keeps the integers. Compression is symmetric: a weight is ``integer * scale``."""

from collections.abc import Mapping
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from openvino.op import Constant
from torch import Tensor

from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.openvino import dtypes
from dlinfer.vendor.openvino.options import OpenVINOOptions
from dlinfer.vendor.openvino.workarounds.constants import (
    part_constants,
    plainly,
    write_absolutes,
    write_nan_factors,
)
from dlinfer.vendor.openvino.workarounds.precision import precisely


def with_weights(
    model: ov.Model,
    weights: Mapping[str, Tensor],
    options: OpenVINOOptions,
    notes: list[str],
    precision: str = "f32",
) -> tuple[ov.Model, list[Tensor]]:
    """Return two values: a copy of the model with the ``weights`` as constants, and the constants' memory.

    weights: parameter name -> tensor; these parameters become constants.
    precision: the model's own floating type.

    The caller must keep the memory alive as long as the compiled model."""
    copy = model.clone()
    keep: list[Tensor] = []
    for node in list(copy.get_ops()):
        mark, _, rest = node.get_friendly_name().partition(_SEPARATOR)
        name, _, sizes = rest.partition(_SEPARATOR)
        if mark == _PACKED and name in weights:
            groups, size = map(int, sizes.split(_SEPARATOR))
            packed = _four_bits(weights[name], groups, size, keep)
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(packed)
    for parameter in list(copy.get_parameters()):
        weight = weights.get(parameter.get_friendly_name())
        if weight is None:
            continue
        plain: Output | None = None
        packed: Output | None = None
        squeezed = options.weights != "model" and _is_compressible(weight, notes, parameter)
        for target in list(parameter.output(0).get_target_inputs()):
            if squeezed and _is_linear(target):
                packed = compressed(weight, options, keep) if packed is None else packed
                target.replace_source_output(packed)
            else:
                plain = _constant(weight, keep, notes, parameter) if plain is None else plain
                target.replace_source_output(plain)
        copy.remove_parameter(parameter)
    # With the old, unknown sizes OpenVINO folds MaxPool into memory that is too small.
    copy.validate_nodes_and_infer_types()
    write = plainly if precision == "f32" else precisely
    write_absolutes(copy, write)
    write_nan_factors(copy, write)
    part_constants(copy, write)
    return copy, keep


def _constant(weight: Tensor, keep: list[Tensor], notes: list[str], parameter: Any) -> Output:
    held = weight.detach().contiguous()
    if held.data_ptr() != weight.data_ptr():
        notes.append(f"{parameter.get_friendly_name()} is copied, {held.nbytes} bytes: it is not contiguous")
    output = dtypes.constant(held, keep)
    if keep[-1] is not held:
        size = keep[-1].nbytes
        notes.append(
            f"{parameter.get_friendly_name()} is copied to float32, {size} bytes: it holds infinities"
        )
    output.get_node().set_friendly_name(parameter.get_friendly_name())
    return output


def _is_compressible(weight: Tensor, notes: list[str], parameter: Any) -> bool:
    """Return whether a weight can be compressed: it is a float matrix without NaN and infinities."""
    if weight.dim() != 2 or not weight.is_floating_point():
        return False
    if bool(weight.isfinite().all()):
        return True
    notes.append(f"{parameter.get_friendly_name()} is not compressed: it holds NaN or infinities")
    return False


def _is_linear(target: Any) -> bool:
    """Return whether an input of a node takes the weight of a linear layer: the second operand of ``x @ weight.T``."""
    node = target.get_node()
    if node.get_type_name() != "MatMul":
        return False
    return target.get_index() == 1 and node.get_attributes()["transpose_b"]


def compressed(weight: Tensor, options: OpenVINOOptions, keep: list[Tensor]) -> Output:
    """Return a [out, in] weight as integers times scales, with its own sizes and type.

    With ``int4``, the weight gets 8 bits all the same if the group size does not divide the length of its rows."""
    rows, columns = weight.shape
    grouped = options.weights == "int4" and columns % options.group_size == 0
    size, largest = (options.group_size, 7) if grouped else (columns, 127)
    held, scales = _quantised(weight, size, largest)
    if grouped:
        integers = Constant(ov.Tensor(held.numpy(), [rows, columns // size, size], ov.Type.i4), True)
    else:
        integers = Constant(dtypes.shared(held), True)
        scales = scales[:, 0]
    keep += [held, scales]
    whole = op.multiply(op.convert(integers, "f32"), Constant(dtypes.shared(scales), True))
    if grouped:
        whole = op.reshape(whole, Constant(ov.Type.i64, ov.Shape([2]), [rows, columns]), False)
    if weight.dtype is not torch.float32:
        whole = op.convert(whole, dtypes.type_of(weight.dtype))
    return whole.output(0)


def _quantised(weight: Tensor, size: int, largest: int) -> tuple[Tensor, Tensor]:
    """Return two tensors: integers from -largest to largest, and float32 scales [rows, groups, 1].

    weight: [rows, groups * size], quantised a few rows at a time. The integers are int8 [rows, columns]; if ``largest``
        is 7, two share a byte."""
    step = max(1, _WIDENED_NUMBERS // max(weight.shape[1], 1))
    numbers, scales = [], []
    for some in weight.detach().split(step):
        integers, scale = quantised(some.unflatten(1, (-1, size)), largest)
        numbers.append(_packed(integers) if largest == 7 else integers.flatten(1))
        scales.append(scale)
    return torch.cat(numbers), torch.cat(scales)


def quantised(weight: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return two tensors: int8 values from -largest to largest, rounded to nearest, and float32 scales [..., 1]."""
    wide = weight.float()
    # At least the smallest normal number: smaller ones may be flushed to 0.
    scales = (wide.abs().amax(-1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales).round().clamp(-largest, largest).to(torch.int8), scales


_WIDENED_NUMBERS = 1 << 20  # of a weight in float32 at a time: a few megabytes


_PACKED, _SEPARATOR = "packed numbers", "|"


def packed_name(parameter: str, groups: int, size: int) -> str:
    """Return a name for the node that unpacks AWQ's words in a parameter to float32 [out, groups, size].

    ``with_weights`` finds the node by this name, and replaces it by a 4-bit constant if the parameter becomes a
    constant."""
    return _SEPARATOR.join((_PACKED, parameter, str(groups), str(size)))


def _four_bits(words: Tensor, groups: int, size: int, keep: list[Tensor]) -> Output:
    """Unpack words [groups * size, out / 8] to a 4-bit constant [out, groups, size], and convert it to float32.

    The plugin recognises the constant and its conversion as the start of a compressed weight, and keeps the weight in 4
    bits."""
    rows = [_packed(AWQ.unpack(part).t()) for part in words.detach().split(_WIDENED_WORDS, 1)]
    held = torch.cat(rows)
    keep.append(held)
    sizes = [words.shape[1] * AWQ.per_word, groups, size]
    return op.convert(Constant(ov.Tensor(held.numpy(), sizes, ov.Type.u4), True), "f32").output(0)


_WIDENED_WORDS = 64  # of a row at a time, so that no full-size integers are allocated


def _packed(integers: Tensor) -> Tensor:
    """Pack two 4-bit values in two's complement into a byte, the first in the low half."""
    pairs = integers.reshape(-1, 2).to(torch.uint8) & 15
    return (pairs[:, 0] | (pairs[:, 1] << 4)).contiguous()
