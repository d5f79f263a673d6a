"""What is computed of constants alone, which OpenVINO 2026.4.1 computes once and then overwrites.

What it can it folds before it compiles. For the rest the CPU plugin runs the ops once, and a later op may write its
result into their memory: the next call reads that, or another op at the same call. Nothing is written into what a roll
reads that is not itself a constant: one by as many places as an input says, which is always 0.

It also drops an Abs whose operand it believes not to be negative, and it believes that of every converted constant.
It fuses a product with NaN and the sum behind it into one op, which treats NaN as another number.

It combines constants of neighbouring linear ops before they meet the data: ``(x + c) * d`` becomes ``x * d + c * d``.
With infinite or extreme constants that overflows, or gives NaN, where the ops one by one do not. It multiplies by the
reciprocal of a constant divisor, which is 0 for a divisor above 2**126.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset16 as op
from openvino import Input, Node, Output
from openvino.passes import ConstantFolding, Manager

NOWHERE = "no places"
"""Name of the input, int64 [1], that such a model has behind all others; no argument of a function has such a name."""

# They write their results into memory of their own; compressed weights stay as they are in front of them.
_APART = ("Constant", "Convolution", "ConvolutionBackpropData", "Gather", "GroupConvolution", "MatMul")

_SUMS = ("Add", "Subtract")
_PRODUCTS = ("Multiply", "Divide")
_WITH_WEIGHTS = ("Convolution", "GroupConvolution", "MatMul")
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60
"""Products and quotients of two numbers between these are normal numbers in float32."""


Write = Callable[..., Output]
"""Calls a function with values and returns the output of the node that it makes: ``plainly``, or in a model that
computes float32 beside 16 bits ``dlinfer.vendor.openvino.workarounds.precision.precisely``."""


def plainly(function: Callable[..., Node], *values: Output) -> Output:
    """The output of the node that a function returns for values."""
    return function(*values).output(0)


def part_constants(model: ov.Model, write: Write = plainly) -> None:
    """Put what is computed of constants alone apart from what may overwrite it; in place.

    Its readers then run at each call. Other values that they read may have to be put apart too, so this is repeated.
    Extreme constants of neighbouring linear ops are put apart first: OpenVINO then leaves the order of these ops alone.
    """
    nowhere, parting = None, set[str]()
    while readers := list(_combined(model)) or list(_overwriting(model, parting)):
        for reader in readers:
            if nowhere is None:
                nowhere = op.parameter([1], ov.Type.i64, name=NOWHERE)
                model.add_parameters([nowhere])
            value = reader.get_source_output()
            part = _times_one if reader.get_node().get_type_name() == "Divide" else _parted
            parted = write(part, value, nowhere.output(0))
            reader.replace_source_output(parted)
            parting.add(_first_of(parted, value).get_name())


def write_absolutes(model: ov.Model, write: Write = plainly) -> None:
    """Write absolute values of what is computed of constants alone as choices; in place."""
    known = _of_constants(model)
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Abs" or node.get_name() not in known:
            continue
        chosen = write(_absolute, node.input_value(0))
        for reader in list(node.output(0).get_target_inputs()):
            reader.replace_source_output(chosen)


def write_nan_factors(model: ov.Model, write: Write = plainly) -> None:
    """Write products with a number that is NaN as sums with it, which are NaN too; in place."""
    known = _of_constants(model)
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Multiply" and any(_is_nan(one, known) for one in node.input_values()):
            total = write(op.add, *node.input_values())
            for reader in list(node.output(0).get_target_inputs()):
                reader.replace_source_output(total)


def _is_nan(value: Output, known: set[str]) -> bool:
    """Whether a value is one number, NaN, that OpenVINO knows before it compiles. known: as ``_of_constants``."""
    if value.get_node().get_name() not in known or not value.get_element_type().is_real():
        return False
    sizes = value.get_partial_shape()
    if not sizes.is_static or prod(sizes.to_shape()) != 1:
        return False
    folded: Any = _folded(value)
    return folded.get_type_name() == "Constant" and bool(np.isnan(folded.get_data(dtype=np.float32)).all())


def _absolute(value: Any) -> Node:
    zero = op.constant(0, value.get_element_type())
    # Not less than 0: 0 - 0 is 0, where -0.0 would stay. NaN is neither, and stays.
    return op.select(op.less_equal(value, zero), op.subtract(zero, value), value)


def no_places() -> ov.Tensor:
    """What the input NOWHERE is given."""
    return ov.Tensor(np.zeros(1, np.int64))


def _combined(model: ov.Model) -> Iterator[Input]:
    """Extreme constants that OpenVINO would combine with the constant of the linear op before; extreme divisors."""
    known = _of_constants(model)
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        data, constant = _data_and_constant(node, known) if kind in (*_SUMS, *_PRODUCTS) else (None, None)
        if data is None or constant is None:
            continue
        constants = [constant] if kind == "Divide" else []
        before = data.get_source_output().get_node()
        inner_data, inner = _data_and_constant(before, known)
        if inner_data is not None and inner is not None:
            if before.get_type_name() in (_SUMS if kind in _SUMS else (*_SUMS, *_PRODUCTS)):
                constants = [constant, inner]
            elif before.get_type_name() in _WITH_WEIGHTS and kind in _PRODUCTS:
                constants = [constant]
        if any(_is_extreme(each.get_source_output()) for each in constants):
            yield constant


def _data_and_constant(node: Node, known: set[str]) -> tuple[Input | None, Input | None]:
    """The two inputs of a node, if only the second is computed of constants alone; swapped if only the first is."""
    inputs = node.inputs()
    if len(inputs) != 2:
        return None, None
    first, second = (one.get_source_output().get_node().get_name() in known for one in inputs)
    if first == second:
        return None, None
    return (inputs[1], inputs[0]) if first else (inputs[0], inputs[1])


def _is_extreme(value: Output) -> bool:
    if not value.get_element_type().is_real():
        return False
    folded: Any = _folded(value)
    if folded.get_type_name() != "Constant":
        return True
    sizes = np.abs(folded.get_data(dtype=np.float32))
    return not bool(((sizes == 0) | ((sizes >= _SMALLEST) & (sizes <= _LARGEST))).all())


def _overwriting(model: ov.Model, parting: set[str]) -> Iterator[Input]:
    """Inputs of ops that may overwrite a value which is computed of constants alone and read again.

    An op that depends on an input of the model too overwrites it for the next call. Where several ops read the value,
    one that is itself computed of constants alone overwrites it for the others: behind a reshape the plugin does not
    look for them. parting: names of ops that only copy.
    """
    known = _of_constants(model)
    for node in model.get_ordered_ops():
        if node.get_name() not in known or node.get_type_name() == "Constant":
            continue
        readers = [one for output in node.outputs() for one in output.get_target_inputs()]
        count, readers = len(readers), [one for one in readers if one.get_node().get_name() not in parting]
        again = [one for one in readers if _may_overwrite(one.get_node(), known)]
        if count > 1:
            again += [one for one in readers if one.get_node().get_name() in known]
        if again and not _is_folded(node):
            yield from again


def _of_constants(model: ov.Model) -> set[str]:
    """The names of constants and of what is computed of them alone."""
    known: set[str] = set()
    for node in model.get_ordered_ops():
        sources = [one.get_source_output().get_node().get_name() for one in node.inputs()]
        if node.get_type_name() == "Constant" or (sources and known.issuperset(sources)):
            known.add(node.get_name())
    return known


def _may_overwrite(reader: Node, known: set[str]) -> bool:
    if reader.get_type_name() == "Result":
        return True
    return reader.get_name() not in known and reader.get_type_name() not in _APART


def _is_folded(node: Node) -> bool:
    """Whether OpenVINO computes a node before it compiles."""
    return _folded(node.output(0)).get_type_name() == "Constant"


def _folded(value: Output) -> Node:
    """The node that gives a value once OpenVINO has folded it: on a copy, since folding alone may change its type."""
    copy = ov.Model([value], [], "constants").clone()  # pyright: ignore[reportGeneralTypeIssues]
    manager = Manager()
    manager.register_pass(ConstantFolding())
    manager.run_passes(copy)
    return copy.get_results()[0].input_value(0).get_node()


def _first_of(parted: Output, value: Output) -> Node:
    """The op that reads a value, of those that part it."""
    node = parted.get_node()
    while node.input_value(0) != value:
        node = node.input_value(0).get_node()
    return node


def _parted(value: Any, nowhere: Any) -> Node:
    first = op.constant([0], ov.Type.i64)
    if not len(value.get_partial_shape()):
        return op.squeeze(op.roll(op.unsqueeze(value, first), nowhere, first), first)
    return op.roll(value, nowhere, first)


def _times_one(value: Any, nowhere: Any) -> Node:
    """A divisor that stays behind this op. OpenVINO moves reciprocals through a roll, up to the constant."""
    one = op.convert(op.equal(nowhere, op.constant([0], ov.Type.i64)), value.get_element_type())
    product = op.multiply(value, one)
    return product if len(value.get_partial_shape()) else op.squeeze(product, op.constant([0], ov.Type.i64))
