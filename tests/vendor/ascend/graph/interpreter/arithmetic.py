"""Elementwise ops and products, as torchair's converters of ATen write them."""

import torch
from torch import Tensor

from tests.vendor.ascend.graph.interpreter.registry import GraphError, op
from tests.vendor.ascend.graph.interpreter.values import ge_dtype


def _alike(*tensors: Tensor) -> None:
    dtypes = {one.dtype for one in tensors}
    if len(dtypes) > 1:
        raise GraphError(f"one dtype, not {sorted(map(str, dtypes))}")


@op("Add")
def add(x1: Tensor, x2: Tensor) -> Tensor:
    _alike(x1, x2)
    return x1 + x2


@op("Cast")
def cast(x: Tensor, *, dst_type: int, truncate: bool = False) -> Tensor:
    return x.to(ge_dtype(dst_type))


@op("MatMul")
def matmul(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_x1: bool = False,
    transpose_x2: bool = False,
) -> Tensor:
    _alike(x1, x2, *(() if bias is None else (bias,)))
    if x1.dim() != 2 or x2.dim() != 2:
        raise GraphError(f"matrices, not {tuple(x1.shape)} and {tuple(x2.shape)}")
    out = (x1.t() if transpose_x1 else x1).float() @ (x2.t() if transpose_x2 else x2).float()
    return (out if bias is None else out + bias.float()).to(x1.dtype)


@op("MatMulV2")
def matmul_v2(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_x1: bool = False,
    transpose_x2: bool = False,
    offset_x: int = 0,
) -> Tensor:
    if offset_x:
        raise GraphError("offset_x is not simulated")
    return matmul(x1, x2, bias, transpose_x1=transpose_x1, transpose_x2=transpose_x2)


@op("TensorMove")
def tensor_move(x: Tensor) -> Tensor:
    return x.clone()


@op("FloorDiv")
def floor_div(x1: Tensor, x2: Tensor) -> Tensor:
    _alike(x1, x2)
    return x1 // x2


@op("Less")
def less(x1: Tensor, x2: Tensor) -> Tensor:
    _alike(x1, x2)
    return x1 < x2


@op("MaskedFill")
def masked_fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    _alike(x, value)
    if mask.dtype is not torch.bool or value.numel() != 1:
        raise GraphError("a mask of bool and one value")
    return x.masked_fill(mask, value.reshape(()).item())


@op("ClipByValueV2")
def clip_by_value_v2(x: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    _alike(x, clip_value_min, clip_value_max)
    return x.clamp(clip_value_min, clip_value_max)


@op("ZerosLike")
def zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@op("Sub")
def sub(x1: Tensor, x2: Tensor) -> Tensor:
    _alike(x1, x2)
    return x1 - x2


@op("Greater")
def greater(x1: Tensor, x2: Tensor) -> Tensor:
    _alike(x1, x2)
    return x1 > x2


@op("GreaterEqual")
def greater_equal(x1: Tensor, x2: Tensor) -> Tensor:
    _alike(x1, x2)
    return x1 >= x2


@op("LogicalOr")
def logical_or(x1: Tensor, x2: Tensor) -> Tensor:
    if x1.dtype is not torch.bool:
        raise GraphError(f"bool, not {x1.dtype}")
    _alike(x1, x2)
    return x1 | x2


@op("Range")
def range_(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    """torchair gives it dtypes that differ, which REG_OP does not forbid."""
    if any(one.dtype not in (torch.int32, torch.int64) for one in (start, limit, delta)):
        raise GraphError("whole numbers")
    return torch.arange(int(start), int(limit), int(delta))


@op("Mul")
def mul(x1: Tensor, x2: Tensor) -> Tensor:
    _alike(x1, x2)
    return x1 * x2


@op("RealDiv")
def real_div(x1: Tensor, x2: Tensor) -> Tensor:
    _alike(x1, x2)
    return x1 / x2


@op("ReduceSum")
def reduce_sum(
    x: Tensor, axes: Tensor, *, keep_dims: bool = False, noop_with_empty_axes: bool = True
) -> Tensor:
    return x.sum(axes.tolist(), keepdim=keep_dims)


@op("Equal")
def equal(x1: Tensor, x2: Tensor, *, is_tensor_output: bool = False) -> Tensor:
    _alike(x1, x2)
    return x1 == x2


@op("SelectV2")
def select_v2(condition: Tensor, then: Tensor, else_: Tensor) -> Tensor:
    _alike(then, else_)
    return torch.where(condition, then, else_)


@op("Identity")
def identity(x: Tensor) -> Tensor:
    return x
