"""Results of library calls, laid out as the graph says.

Loops are compiled for the strides that an op's fake function gives. torch's own kernels do not always keep to them: a
convolution of one image whose channels lie last gives a contiguous result where its fake function says channels last.
Read by the other strides that would be wrong numbers, without a word. So behind each kernel that has not shown that it
keeps to its fake function stands a look at its result, and where it lies otherwise, a copy.
"""

import operator

import torch
from torch import fx

from dlinfer.graph.ir.dialect import fake, is_compute, overload, written_arguments
from dlinfer.graph.seam.symbols import example_number

_KEPT = {
    "aten::linear",
    "aten::matmul",
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::embedding",
    "aten::index_select",
    "aten::scaled_dot_product_attention",
}
"""Kernels whose results lie as their fakes say; it saves the commonest a microsecond."""


def memory_order(node: fx.Node) -> tuple[int, ...] | None:
    """How the dimensions of a kernel's result, or of one of its results, lie in memory by its fake, outermost first.

    None for views and memory that was there before, where the order is certain, and where the result has gaps or
    overlaps, which no copy here would give it, or sizes without an example.
    """
    maker = node.all_input_nodes[0] if node.target is operator.getitem else node
    if maker.op != "call_function" or not is_compute(maker) or written_arguments(maker):
        return None
    value, op = fake(node), overload(maker)
    if op is not None and (op.namespace == "dlinfer" or op._schema.name in _KEPT):
        return None
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    strides = [example_number(stride) for stride in value.stride()]
    sizes = [example_number(size) for size in value.shape]
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], sizes[dim] == 1))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            return None
        expected *= max(sizes[dim], 1)
    return tuple(order)


def laid_out(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The tensor, or a copy of it, dense with its dimensions in this order of memory."""
    ordered = tensor.permute(order)
    if ordered.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return ordered.contiguous().permute(inverse)
