"""Sizes, strides and contiguity of fake tensors, and the step that enforces a layout.

The queries add no guard. An answer such as "contiguous" or "equal" holds for every value of the symbols. ``laid_out``
runs after a kernel, on the kernel's real result.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dlinfer.graph.torch_private.symbols import expression_of, same_expression

Order = tuple[int, ...]
"""A tensor's dimensions in the order of memory, outermost first."""

LAYOUT = "layout"
"""The callee of the step that calls ``laid_out``."""


def same_size(left: object, right: object) -> bool:
    """Return whether two sizes, strides or offsets are certainly equal: the same number or the same expression."""
    return expression_of(left) == expression_of(right)


def same_sizes(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(same_size, left, right))


def same_place(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two views of the same memory certainly have the same elements, shape, strides and dtype."""
    return (
        left.dtype is right.dtype
        and same_sizes(left.shape, right.shape)
        and same_sizes(left.stride(), right.stride())
        and same_size(left.storage_offset(), right.storage_offset())
    )


def is_static(*sizes: object) -> bool:
    """Return whether all sizes are plain numbers, not symbols."""
    return all(isinstance(size, int) for size in sizes)


def is_contiguous(value: torch.Tensor) -> bool:
    """Return whether a fake is certainly contiguous; ``Tensor.is_contiguous`` takes milliseconds on symbolic sizes."""
    return is_dense(value, range(value.dim()))


def is_dense(value: torch.Tensor, order: Sequence[int]) -> bool:
    """Return whether a fake certainly has no gaps and no overlaps, with its dimensions in this order."""
    expected: int | torch.SymInt = 1
    for dim in reversed(order):
        size, stride = value.shape[dim], value.stride(dim)
        if same_size(size, 1):
            continue
        if not same_size(stride, expected):
            return False
        expected = stride * _counted(size)
    return True


def dense_order(value: torch.Tensor) -> Order | None:
    """Return the order of a fake's dimensions in memory; None if it may have gaps or overlaps."""
    own = tuple(range(value.dim()))
    if is_contiguous(value) or any(same_size(size, 0) for size in value.shape):
        return own
    left, order = list(own), list[int]()
    expected: int | torch.SymInt = 1
    while left:
        # From the innermost: take the dimension whose stride is the number of elements so far. If several fit, take the
        # last. Dimensions of size 1 fit anywhere, and stay in their place if they can.
        free = [dim for dim in left if same_size(value.shape[dim], 1)]
        fitting = [dim for dim in left if same_size(value.stride(dim), expected)]
        if not fitting and not free:
            fitting = [dim for dim in left if same_expression(value.stride(dim), expected)]
        if not fitting and not free:
            return None
        dim = left[-1] if left[-1] in free else max(fitting) if fitting else max(free)
        left.remove(dim)
        order.insert(0, dim)
        if dim not in free:
            expected = expected * _counted(value.shape[dim])
    return tuple(order)


def _counted(size: int | torch.SymInt) -> Any:
    """Return the factor that a size adds to outer strides: the size itself, or 1 for a size of 0."""
    if isinstance(size, int):
        return max(size, 1)
    return torch.sym_max(size, 1)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def laid_out(tensor: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Return the tensor if it lies densely in memory with its dimensions in ``order``, else a copy with this layout.

    order: the dimensions, outermost first; None for a contiguous layout.
    """
    if order is None:
        return tensor.contiguous()
    ordered = tensor.permute(order)
    # torch's own question would guard on unbacked sizes, and refuse.
    if ordered.is_contiguous() if is_static(*ordered.shape) else is_contiguous(ordered):
        return tensor
    return ordered.contiguous().permute(inverse_order(order))


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first element to its last one in memory, gaps included."""
    return 0 if 0 in sizes else 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def inverse_order(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
