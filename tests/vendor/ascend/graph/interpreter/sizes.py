"""Constants, shapes and views."""

import math

import torch
from torch import Tensor

from tests.vendor.ascend.graph.interpreter.registry import GraphError, op
from tests.vendor.ascend.graph.interpreter.values import ge_dtype


@op("Const")
def const(*, value: Tensor) -> Tensor:
    return value


@op("Transpose")
def transpose(x: Tensor, perm: Tensor) -> Tensor:
    if sorted(perm.tolist()) != list(range(x.dim())):
        raise GraphError(f"perm {perm.tolist()} of {x.dim()} dimensions")
    return x.permute(perm.tolist()).contiguous()


@op("Reshape")
def reshape(x: Tensor, shape: Tensor, *, axis: int = 0, num_axes: int = -1) -> Tensor:
    if (axis, num_axes) != (0, -1):
        raise GraphError("axis and num_axes are not simulated")
    return x.reshape(shape.tolist())


@op("Shape")
def shape(x: Tensor, *, dtype: int) -> Tensor:
    return torch.tensor(x.shape, dtype=ge_dtype(dtype))


@op("ReduceProdD")
def reduce_prod_d(x: Tensor, *, axes: list[int], keep_dims: bool) -> Tensor:
    if axes != [0] or keep_dims or x.dim() != 1:
        raise GraphError(f"axes {axes} of {x.dim()} dimensions")
    return torch.tensor(math.prod(x.tolist()), dtype=x.dtype)


@op("Gather")
def gather(
    x: Tensor,
    indices: Tensor,
    *,
    validate_indices: bool = True,
    batch_dims: int = 0,
    is_preprocessed: bool = False,
    negative_index_support: bool = False,
) -> Tensor:
    if batch_dims or is_preprocessed or negative_index_support:
        raise GraphError("batch_dims, is_preprocessed and negative_index_support are not simulated")
    flat = indices.reshape(-1).long()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < x.shape[0]:
        raise GraphError(f"indices outside 0..{x.shape[0] - 1}")
    return x[flat].reshape((*indices.shape, *x.shape[1:]))


@op("Pack", lists="x")
def pack(x: list[Tensor], *, N: int, axis: int = 0) -> Tensor:  # noqa: N803 - GE's name
    if len(x) != N:
        raise GraphError(f"N is {N}, and there are {len(x)}")
    return torch.stack(x, axis)


@op("Unsqueeze")
def unsqueeze(x: Tensor, *, axes: list[int]) -> Tensor:
    for axis in sorted(axes):
        x = x.unsqueeze(axis)
    return x


@op("Squeeze")
def squeeze(x: Tensor, *, axis: list[int]) -> Tensor:
    if any(x.shape[one] != 1 for one in axis):
        raise GraphError(f"axis {axis} of sizes {tuple(x.shape)}")
    return x.squeeze(axis)


@op("SplitV")
def split_v(x: Tensor, size_splits: Tensor, split_dim: Tensor, *, num_split: int) -> list[Tensor]:
    """One size may be -1: what is left."""
    sizes, whole = size_splits.tolist(), x.shape[int(split_dim)]
    sizes = [size if size >= 0 else whole - sum(sizes) - 1 for size in sizes]
    parts = x.split(sizes, int(split_dim))
    if len(parts) != num_split:
        raise GraphError(f"num_split is {num_split}, and there are {len(parts)}")
    return [part.contiguous() for part in parts]


@op("Fill")
def fill(dims: Tensor, value: Tensor) -> Tensor:
    return value.reshape(()).expand(dims.tolist()).contiguous()


@op("GatherV2")
def gather_v2(
    x: Tensor,
    indices: Tensor,
    axis: Tensor,
    *,
    batch_dims: int = 0,
    is_preprocessed: bool = False,
    negative_index_support: bool = False,
) -> Tensor:
    if int(axis):
        raise GraphError("another axis than 0 is not simulated")
    return gather(
        x,
        indices,
        batch_dims=batch_dims,
        is_preprocessed=is_preprocessed,
        negative_index_support=negative_index_support,
    )


@op("Empty")
def empty(shape: Tensor, *, dtype: int, init: bool = False) -> Tensor:
    """Filled with what nobody may read."""
    return torch.full(shape.tolist(), torch.nan, dtype=ge_dtype(dtype))


@op("ConcatV2", lists="x")
def concat(x: list[Tensor], concat_dim: Tensor, *, N: int) -> Tensor:  # noqa: N803 - GE's name
    if len(x) != N:
        raise GraphError(f"N is {N}, and there are {len(x)}")
    return torch.cat(x, int(concat_dim))
