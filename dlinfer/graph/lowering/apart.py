"""The inputs that a compiled graph assumes to share no memory, and the check of this assumption at each call.

Bool tensors and tensors of dtypes wider than one byte seldom share memory, so ``ir/effects`` treats a bool mask and a
KV cache as independent. But an allocator may cut both from one block of memory. So each call checks that they do not
overlap.
"""

from collections.abc import Iterator, Sequence

from torch import fx

from dlinfer.errors import DlinferError
from dlinfer.graph.ir.dialect import storages
from dlinfer.graph.ir.effects import effects_of
from dlinfer.graph.ir.program import Inputs

Apart = list[tuple[list[int], list[int]]]
"""Pairs of two lists of input positions. No input of the first list may share memory with an input of the second."""


class SharedMemoryError(DlinferError, ValueError):
    """A bool input of a call shares memory with an input of a wider dtype, and the graph writes one of the two."""

    message = (
        "input {bools} of the graph (bools) shares memory with input {wider} (a wider dtype), and the graph writes "
        "into one of the two. The graph was compiled for inputs that do not share memory."
    )
    next_step = "pass a copy of the bools (mask.clone()), or call the function without torch.compile."


def apart_of(graph: fx.Graph) -> Apart:
    """Return pairs of groups of inputs: no input of the first group may share memory with one of the second.

    A bool input must not share memory with an input of a dtype wider than one byte, if the graph writes one of the two.
    """
    effects = effects_of(graph)
    bools, _, wide = effects.by_width
    inputs = list(enumerate(graph.find_nodes(op="placeholder")))
    of_bools = [(index, node) for index, node in inputs if storages(node) & bools]
    of_wide = [(index, node) for index, node in inputs if storages(node) & wide]
    written_bools = [index for index, node in of_bools if effects.is_written(node)]
    written_wide = [index for index, node in of_wide if effects.is_written(node)]
    pairs = (
        ([index for index, _ in of_bools], written_wide),
        (written_bools, [index for index, _ in of_wide]),
    )
    return [(first, second) for first, second in pairs if first and second]


def check_apart(apart: Apart, inputs: Inputs) -> None:
    """Raise SharedMemoryError if inputs share memory although the graph assumes that they do not."""
    for first, second in apart:
        ranges = list(_ranges(inputs, first))
        for begin, end, index in _ranges(inputs, second):
            for other_begin, other_end, other in ranges:
                if begin < other_end and other_begin < end:
                    raise SharedMemoryError(bools=other, wider=index)


def _ranges(inputs: Inputs, positions: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for index in positions:
        storage = inputs[index].untyped_storage()
        begin = storage.data_ptr()
        yield begin, begin + storage.nbytes(), index
