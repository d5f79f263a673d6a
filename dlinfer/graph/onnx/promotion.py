"""Insert the casts of torch's type promotion, because ONNX's elementwise ops take operands of one type."""

import torch
from torch import fx

from dlinfer.graph.ir.dialect import arguments, fake, overload
from dlinfer.graph.torch_private.fake_mode import mode_of

_aten = torch.ops.aten

_CHOOSERS = {"aten::where": ("condition",), "aten::masked_fill": ("mask",)}
"""Operands that select among the others, and do not promote."""

_OWN_DTYPE = frozenset(
    {"aten::_to_copy", "aten::to", "aten::copy", "aten::bitwise_left_shift", "aten::bitwise_right_shift"}
)
"""Elementwise ops with a dtype argument, or whose operands do not promote."""


_ACCUMULATING = frozenset({"aten::cumsum", "aten::sum", "aten::prod"})
"""Ops that accumulate in the dtype of their result, which is int64 for bools and small integers."""


def promote(graph: fx.Graph) -> None:
    """Insert the casts that torch does inside its elementwise and accumulating ops. Changes ``graph``."""
    for node in list(graph.nodes):
        op = overload(node)
        if op is not None and op._schema.name in _ACCUMULATING:
            for operand in _operands(node):
                value = fake(operand)
                if isinstance(value, torch.Tensor) and value.dtype != fake(node).dtype:
                    _cast(graph, node, operand, fake(node).dtype)
            continue
        if op is None or torch.Tag.pointwise not in op.tags or op._schema.name in _OWN_DTYPE:
            continue
        operands = _operands(node)
        tensors = [value for value in map(fake, operands) if isinstance(value, torch.Tensor)]
        wanted = _dtype(node, tensors)
        if wanted is None and 0 < len(tensors) < len(operands):
            wanted = tensors[0].dtype
        for operand in operands:
            if wanted is not None and getattr(fake(operand), "dtype", None) != wanted:
                _cast(graph, node, operand, wanted)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors and sizes that a node computes with."""
    op = overload(node)
    assert op is not None
    choosers = _CHOOSERS.get(op._schema.name, ())
    given = [value for name, value in arguments(node).items() if name not in choosers]
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat)
    return [value for value in given if isinstance(value, fx.Node) and isinstance(fake(value), kinds)]


def _dtype(node: fx.Node, operands: list[torch.Tensor]) -> torch.dtype | None:
    """The dtype that a node computes in; None where its operands need no cast."""
    result = fake(node)
    if not isinstance(result, torch.Tensor) or not operands:
        return None
    if result.dtype != torch.bool:
        return result.dtype
    numbers = [value for value in arguments(node).values() if isinstance(value, (int, float))]
    dtype = operands[0].dtype
    for index, operand in enumerate(operands):
        dtype = (
            torch.result_type(operands[0], operand)
            if index < 2
            else torch.promote_types(dtype, operand.dtype)
        )
    for number in numbers:
        dtype = torch.result_type(torch.empty(1, dtype=dtype), number)
    return None if all(operand.dtype == dtype for operand in operands) else dtype


def _cast(graph: fx.Graph, node: fx.Node, operand: fx.Node, dtype: torch.dtype) -> None:
    with graph.inserting_before(node):
        cast = graph.call_function(_aten._to_copy.default, (operand,), {"dtype": dtype})
    with mode_of([fake(node)]):
        value = fake(operand)
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        cast.meta = {
            "val": torch.empty(shape, dtype=dtype),
            "nn_module_stack": {},
        }
    node.replace_input_with(operand, cast)
