"""Workarounds for values that depend only on constants: OpenVINO 2026.4.1 computes them once, then overwrites them.

OpenVINO folds many of these values before it compiles. The CPU plugin computes the other values once, but a later op
may reuse their memory for its own result. The next call, or another op of the same call, then reads that result. No op
reuses the memory of a roll's operand, if the roll depends on an input. So a value that an op would overwrite becomes
the operand of a roll by an input that is always 0, and the op reads the roll.

OpenVINO also drops an Abs of an operand that it considers non-negative, and it considers every converted constant
non-negative. It fuses a product with NaN and the sum after it into one op, which treats NaN as a number.

OpenVINO combines constants of neighbouring linear ops: ``(x + c) * d`` becomes ``x * d + c * d``. With infinite or
extreme constants that overflows or gives NaN, unlike the separate ops. To divide by a constant, OpenVINO multiplies by
its reciprocal, which is 0 for a divisor above 2**126."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset16 as op
from openvino import Input, Node, Output
from openvino.passes import ConstantFolding, Manager

NOWHERE = "no places"
"""Name of the extra last input, int64 [1] and always 0, that shifts rolls by 0. No argument has this name."""

# Ops that write their results to their own memory. Weights before them stay compressed.
_APART = ("Constant", "Convolution", "ConvolutionBackpropData", "Gather", "GroupConvolution", "MatMul")

_SUMS = ("Add", "Subtract")
_PRODUCTS = ("Multiply", "Divide")
_WITH_WEIGHTS = ("Convolution", "GroupConvolution", "MatMul")
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60
"""Products and quotients of two numbers between these are normal numbers in float32."""


Write = Callable[..., Output]
"""Calls a function that builds nodes. It is ``plainly``, or ``precision.precisely`` if float32 nodes need a mark."""


def plainly(function: Callable[..., Node], *values: Output) -> Output:
    return function(*values).output(0)


def part_constants(model: ov.Model, write: Write = plainly) -> None:
    """Insert a roll before each op that may overwrite a value that depends only on constants; mutates the model.

    The readers of a new roll then run at each call, and may overwrite other values, so this repeats. Extreme constants
    of neighbouring linear ops get a roll too, because OpenVINO does not combine constants behind a roll.
    write: builds the roll's nodes, see ``Write``."""
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
    """Write a Select in place of each Abs whose operand depends only on constants; mutates the model."""
    known = _of_constants(model)
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Abs" or node.get_name() not in known:
            continue
        chosen = write(_absolute, node.input_value(0))
        for reader in list(node.output(0).get_target_inputs()):
            reader.replace_source_output(chosen)


def write_nan_factors(model: ov.Model, write: Write = plainly) -> None:
    """Write a sum, which is NaN too, in place of each product with a NaN constant; mutates the model."""
    known = _of_constants(model)
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Multiply" and any(_is_nan(value, known) for value in node.input_values()):
            total = write(op.add, *node.input_values())
            for reader in list(node.output(0).get_target_inputs()):
                reader.replace_source_output(total)


def _is_nan(value: Output, known: set[str]) -> bool:
    """Return whether a value is a single NaN that OpenVINO folds. known: the result of ``_of_constants``."""
    if value.get_node().get_name() not in known or not value.get_element_type().is_real():
        return False
    sizes = value.get_partial_shape()
    if not sizes.is_static or prod(sizes.to_shape()) != 1:
        return False
    folded: Any = _folded(value)
    return folded.get_type_name() == "Constant" and bool(np.isnan(folded.get_data(dtype=np.float32)).all())


def _absolute(value: Any) -> Node:
    zero = op.constant(0, value.get_element_type())
    # less_equal, not less: 0 - -0.0 is 0. NaN compares false and stays.
    return op.select(op.less_equal(value, zero), op.subtract(zero, value), value)


def no_places() -> ov.Tensor:
    return ov.Tensor(np.zeros(1, np.int64))


def _combined(model: ov.Model) -> Iterator[Input]:
    """Yield inputs that read constants: extreme divisors, and constants that OpenVINO would combine with others.

    OpenVINO combines the constants of two neighbouring linear ops. Only pairs with an extreme constant count.
    """
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
    """Return two inputs of a node: the one that reads data, and the one that reads a constant.

    Return (None, None) unless the node has exactly one input of each kind.
    """
    inputs = node.inputs()
    if len(inputs) != 2:
        return None, None
    first, second = (port.get_source_output().get_node().get_name() in known for port in inputs)
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
    """Yield inputs of ops that may overwrite a value before it is read again. The values depend only on constants.

    There are two kinds of such ops. An op that also depends on an input of the model overwrites a value that the next
    call reads. An op that depends only on constants may overwrite a value that other ops still have to read. That
    happens because the plugin misses readers behind a reshape.
    parting: names of the nodes that ``part_constants`` inserted. They only copy a value."""
    known = _of_constants(model)
    for node in model.get_ordered_ops():
        if node.get_name() not in known or node.get_type_name() == "Constant":
            continue
        readers = [port for output in node.outputs() for port in output.get_target_inputs()]
        count, readers = len(readers), [port for port in readers if port.get_node().get_name() not in parting]
        again = [port for port in readers if _may_overwrite(port.get_node(), known)]
        if count > 1:
            again += [port for port in readers if port.get_node().get_name() in known]
        if again and not _is_folded(node):
            yield from again


def _of_constants(model: ov.Model) -> set[str]:
    """Return the names of constants, and of nodes that depend only on constants."""
    known: set[str] = set()
    for node in model.get_ordered_ops():
        sources = [port.get_source_output().get_node().get_name() for port in node.inputs()]
        if node.get_type_name() == "Constant" or (sources and known.issuperset(sources)):
            known.add(node.get_name())
    return known


def _may_overwrite(reader: Node, known: set[str]) -> bool:
    if reader.get_type_name() == "Result":
        return True
    return reader.get_name() not in known and reader.get_type_name() not in _APART


def _is_folded(node: Node) -> bool:
    return _folded(node.output(0)).get_type_name() == "Constant"


def _folded(value: Output) -> Node:
    """Return the node that a value has after folding.

    The folding runs on a copy, because it may change a node's type.
    """
    copy = ov.Model([value], [], "constants").clone()  # pyright: ignore[reportGeneralTypeIssues]
    manager = Manager()
    manager.register_pass(ConstantFolding())
    manager.run_passes(copy)
    return copy.get_results()[0].input_value(0).get_node()


def _first_of(parted: Output, value: Output) -> Node:
    """Return the node that reads ``value`` itself, among the nodes that compute ``parted`` from ``value``."""
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
    """Multiply a divisor that depends only on constants by 1, so that OpenVINO cannot fold its reciprocal.

    A roll would not do: OpenVINO moves reciprocals through rolls to the constant.
    nowhere: the model's input that is always 0. The 1 is computed from it, so that it is no constant.
    """
    unit = op.convert(op.equal(nowhere, op.constant([0], ov.Type.i64)), value.get_element_type())
    product = op.multiply(value, unit)
    return product if len(value.get_partial_shape()) else op.squeeze(product, op.constant([0], ov.Type.i64))
