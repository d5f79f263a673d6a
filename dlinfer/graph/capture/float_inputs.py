"""Float arguments, such as a temperature, as dynamic inputs of the graph.

Dynamo passes a float as a 0-d tensor and reads it with ``item``. The capture records arithmetic and comparisons on the
0-d tensor. It inserts casts, so that results are rounded as if the operand were a Python number. For any other use of
the float, the graph specializes on the float's value, with a guard.
"""

import itertools
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dlinfer.graph.ir.device import HOST
from dlinfer.graph.torch_private.dynamo import input_sources, recompilation_cause, source_name
from dlinfer.graph.torch_private.symbols import free_unbacked_symbols

_Binary = Callable[[Any, Any], Any]


def _spelled(names: str, function: _Binary) -> dict[object, _Binary]:
    """Return callee -> ``function`` for Python operators, torch functions and methods.

    names: the names of these operators, functions and methods, separated by spaces, such as "mul multiply".
    """
    spellings = ((getattr(operator, name, None), getattr(torch, name, None), name) for name in names.split())
    return dict.fromkeys(itertools.chain(*spellings), function)


_ARITHMETIC = {
    **_spelled("add", torch.add),
    **_spelled("sub subtract", torch.sub),
    **_spelled("mul multiply", torch.mul),
    **_spelled("truediv div divide true_divide", torch.div),
    **_spelled("pow", torch.pow),
}
_IN_PLACE = {
    **_spelled("iadd add_", torch.add),
    **_spelled("isub sub_", torch.sub),
    **_spelled("imul mul_", torch.mul),
    **_spelled("itruediv div_", torch.div),
}
_COMPARISONS: dict[object, _Binary] = {
    spelling: function
    for name in ("gt", "ge", "lt", "le", "eq", "ne")
    for spelling, function in _spelled(name, getattr(torch, name)).items()
}
_HALF = (torch.bfloat16, torch.float16)


def is_float_read(node: fx.Node) -> bool:
    """Return whether a node of a Dynamo graph reads a float input with ``item``."""
    return (
        node.op == "call_method"
        and node.target == "item"
        and isinstance(node.meta.get("example_value"), torch.SymFloat)
        and not free_unbacked_symbols(node.meta["example_value"])  # the model's own item() of a tensor
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op == "placeholder"
    )


def changing_floats(graph: fx.Graph) -> set[fx.Node]:
    """Return the placeholders of the graph whose floats may change between calls.

    These are the function's arguments, and inputs that caused a recompilation. Floats of modules, such as the eps of
    LayerNorm, stay constants, because fusion rules read their values. If an input is not on the CPU, all floats stay
    constants.
    """
    placeholders = graph.find_nodes(op="placeholder")
    if any(_device(node) not in (HOST, None) for node in placeholders):
        return set()  # other devices' kernels take no host tensor as a number
    sources, cause = input_sources(graph), recompilation_cause()
    return {
        node
        for node, source in zip(placeholders, sources, strict=True)
        if source and (_ARGUMENT.fullmatch(source) or source in cause or source_name(source) in cause)
    }


_ARGUMENT = re.compile(r"L\['(?!self')\w+'\]|L\['args'\]\[\d+\]|L\['kwargs'\]\['\w+'\]")


def _device(node: fx.Node) -> str | None:
    device = getattr(node.meta.get("example_value"), "device", None)
    return None if device is None else device.type


def on_floats(node: fx.Node, args: Any, kwargs: object, floats: tuple[bool, ...]) -> object:
    """Run a node on float inputs that are 0-d float64 tensors. Return the node's result.

    Return None if the node needs the values of the floats.
    args: the node's arguments. floats: for each argument, whether it is a float input.
    """
    expected = node.meta.get("example_value")
    if kwargs or len(args) != 2:
        return None
    if isinstance(expected, torch.SymFloat):
        function = _ARITHMETIC.get(node.target)
        return None if function is None else _of_numbers(function, args)
    if not isinstance(expected, torch.Tensor) or all(floats):
        return None
    other = args[floats.index(False)]
    if not isinstance(other, torch.Tensor) or other.is_complex() or expected.is_complex():
        return None
    if node.target in _COMPARISONS:
        dtype = other.dtype if other.is_floating_point() else torch.get_default_dtype()
        return _COMPARISONS[node.target](*_cast(args, floats, dtype))
    if node.target in _IN_PLACE and not floats[0] and expected.is_floating_point():
        return args[0].copy_(_rounded(_IN_PLACE[node.target], args, floats, expected.dtype))
    if node.target in _ARITHMETIC and expected.is_floating_point():
        return _rounded(_ARITHMETIC[node.target], args, floats, expected.dtype)
    return None


def _of_numbers(function: _Binary, args: Any) -> object:
    """Compute a float, as a 0-d tensor, from two numbers. At least one of the numbers is a float input."""
    left, right = args
    if not isinstance(left, torch.Tensor):
        left = right.new_full((), left)
    return function(left, right)


def _rounded(function: _Binary, args: Any, floats: tuple[bool, ...], dtype: torch.dtype) -> torch.Tensor:
    """Compute a tensor from a tensor and a float input, rounded as torch's kernels round.

    dtype: the result's dtype; the float is cast to it. Products and quotients of 16-bit floats use float32.
    """
    left, right = args
    if floats[0] and function is torch.div:  # as in Tensor.__rtruediv__
        function, left, right, floats = torch.mul, right.reciprocal(), left, (False, True)
    half = dtype in _HALF and function in (torch.mul, torch.div)
    compute = torch.float32 if half else dtype
    result = function(*_cast((left, right), (floats[0] or half, floats[1] or half), compute))
    return result if result.dtype is dtype else result.to(dtype)


def _cast(args: Any, which: tuple[bool, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        value.to(dtype) if is_cast and value.dtype is not dtype else value
        for value, is_cast in zip(args, which, strict=True)
    ]
