"""Decide whether an input's new content may be computed in the input's memory, and whether a call's inputs overlap."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from dlinfer.graph.ir.dialect import fake, has_tag, overload, schema_name, tensor_or_none
from dlinfer.graph.ir.layout import same_sizes, span

_PLACED = frozenset(
    f"aten::{name}"
    for name in (
        "index_copy index_put index_fill index_add scatter scatter_add scatter_reduce slice_scatter select_scatter"
        " masked_fill masked_scatter copy"
    ).split()
)
"""Ops that compute each element of the result from one element of their first argument, the one at the same index."""


def reads_in_place(graph: fx.Graph, index: int, content: object) -> bool:
    """Return whether the new content of an input may be computed in the input's own memory.

    This is so if at most one op reads the old content. This op must compute each element of its result from the element
    of the old content at the same index.
    index: the input's position among the inputs. content: the node that computes the new content.
    """
    old = graph.find_nodes(op="placeholder")[index]
    if content is old or any(user.op == "output" for user in old.users):
        return False
    readers = [user for user in old.users if overload(user) is not torch.ops.aten.sym_size.int]
    return len(readers) < 2 and all(_in_place(reader, old) for reader in readers)


def _in_place(reader: fx.Node, old: fx.Node) -> bool:
    name = schema_name(reader)
    if not name or reader.all_input_nodes.count(old) != 1:
        return False
    if name.startswith("dlinfer_values::"):  # it replaced an op that wrote into this memory
        return True
    result = tensor_or_none(reader)
    if result is None or not same_sizes(result.shape, fake(old).shape):
        return False
    is_first = bool(reader.args) and reader.args[0] is old
    return has_tag(reader, torch.Tag.pointwise) or (name in _PLACED and is_first)


def overlapping(inputs: Sequence[object], written: Collection[int]) -> str | None:
    """Return a text that says which inputs overlap, if a written input overlaps another input or itself; else None.

    inputs: tensors and numbers of a call. written: indices of the inputs that the call writes.
    """
    for index in written:
        value = inputs[index]
        if isinstance(value, Tensor) and _overlaps_itself(value):
            return f"input {index} is written, but some of its elements share memory"
    ranges = sorted(
        (value.data_ptr(), value.data_ptr() + span(value.shape, value.stride()) * value.element_size(), index)
        for index, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.numel()
    )
    reach, owner = 0, -1
    # The furthest end of any earlier input, and of any earlier written input. An overlap matters if either is written.
    written_reach, written_owner = 0, -1
    for start, end, index in ranges:
        if start < written_reach or (index in written and start < reach):
            other = written_owner if start < written_reach else owner
            return f"inputs {min(index, other)} and {max(index, other)} share memory that is written"
        if end > reach:
            reach, owner = end, index
        if index in written and end > written_reach:
            written_reach, written_owner = end, index
    return None


def _overlaps_itself(tensor: Tensor) -> bool:
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
