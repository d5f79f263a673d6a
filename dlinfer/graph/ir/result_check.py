"""Assert that the result of an op outside dlinfer has the dtype and sizes of the op's fake function.

Compiled loops read memory by the fake's sizes. If the result were smaller, the loops would read past its end. dlinfer's
own ops are not checked here: conformance tests compare their kernels with their fake functions.
"""

from collections.abc import Sequence

import torch
from torch import fx

from dlinfer.graph.ir.dialect import describe, fake, input_with, op_name, overload
from dlinfer.graph.ir.effects import made_memory
from dlinfer.graph.torch_private.symbols import fixed_size, plain_symbol

CHECK = "check"
"""The kind of the steps that call ``check_result``. A step's callee is this word and the name of the checked op."""

_aten = torch.ops.aten
_PLAIN_COPIES = (
    _aten.reshape.default,
    _aten.flatten.using_ints,
    _aten.unflatten.int,
    _aten.contiguous.default,
    _aten.clone.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
)


def maker_of(node: fx.Node) -> str:
    """Return the name of the op that computes a node's result.

    If the node takes an item of a sequence, this is the op that returned the sequence.
    """
    while overload(node) is None and node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return op_name(node)


Size = int | fx.Node | tuple[fx.Node, int] | None
"""An expected size: a number, an input that is the size, or a pair (input, dimension). None accepts any size."""


def expected_result(node: fx.Node) -> tuple[torch.dtype, tuple[Size, ...]] | None:
    """Return the dtype and the sizes that a node's result must have.

    Return None if there is nothing to check. This is so for a result that the op did not allocate, for dlinfer's ops,
    and for plain copies.
    A size is None if no input has it. Later readers take this size from the result itself, or assert it.
    """
    value = fake(node)
    if not isinstance(value, torch.Tensor) or not made_memory(node) or overload(node) in _PLAIN_COPIES:
        return None
    if maker_of(node).startswith("dlinfer."):
        return None  # conformance tests a vendor's kernels against the fake function
    return value.dtype, tuple(_size(node.graph, size) for size in value.shape)


def _size(graph: fx.Graph, size: object) -> Size:
    symbol = plain_symbol(size)
    return fixed_size(size) if symbol is None else input_with(symbol, graph.find_nodes(op="placeholder"))


def check_result(
    result: torch.Tensor, dtype: torch.dtype, sizes: Sequence[int | tuple[torch.Tensor, int] | None]
) -> None:
    """Raise ValueError if the result's dtype, number of dimensions or a size differs from the expected one.

    sizes: the expected sizes, one for each dimension. A pair (tensor, dimension) means the size of that tensor in that
    dimension. None accepts any size.
    """
    shape = result.shape
    if result.dtype is dtype and shape == sizes:
        return
    expected = [size[0].shape[size[1]] if isinstance(size, tuple) else size for size in sizes]
    if (
        result.dtype is not dtype
        or len(shape) != len(expected)
        or any(number not in (None, size) for number, size in zip(expected, shape, strict=True))
    ):
        said = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(
            f"the op returned {describe(result)}, but its fake function returns "
            f"{str(dtype).removeprefix('torch.')}[{said}]: correct the fake function; torch.library.opcheck tests it"
        )
