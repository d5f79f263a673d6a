"""torch's dtypes and OpenVINO's, and one's tensors as the other's without a copy."""

from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from openvino.op import Constant
from torch import Tensor

from dlinfer.vendor.openvino.int_ranges.kept import Kept

KEPT = Kept("OpenVINO", bits=32, cast=2**24)
"""int64 is 32 bits in the CPU plugin, which casts floats by way of float32: above 2**24 that has no odd numbers."""

_TYPES: dict[torch.dtype, ov.Type] = {
    torch.float32: ov.Type.f32,
    torch.bfloat16: ov.Type.bf16,
    torch.float16: ov.Type.f16,
    torch.int64: ov.Type.i64,
    torch.int32: ov.Type.i32,
    torch.int16: ov.Type.i16,
    torch.int8: ov.Type.i8,
    torch.uint8: ov.Type.u8,
    torch.bool: ov.Type.boolean,
}

SHORT = {ov.Type.bf16: torch.bfloat16, ov.Type.f16: torch.float16}
"""Floats of 16 bits."""

# numpy has no bfloat16: its bits travel as integers.
_BITS = {torch.bfloat16: torch.int16}


def refusal(dtype: torch.dtype) -> str | None:
    """Why tensors of a dtype do not go to OpenVINO; None where they do."""
    if dtype is torch.float64:
        return "float64, which OpenVINO's plugins compute in float32"
    return None if dtype in _TYPES else f"dtype {str(dtype).removeprefix('torch.')}"


def type_of(dtype: torch.dtype) -> ov.Type:
    """OpenVINO's type of the same values. Raises KeyError for one that ``refusal`` refuses."""
    return _TYPES[dtype]


def shared(tensor: Tensor) -> ov.Tensor:
    """An OpenVINO tensor on a contiguous CPU tensor's memory.

    It does not keep that memory alive: who uses it must hold the torch tensor as long.
    """
    bits = tensor.detach()
    kind = _BITS.get(tensor.dtype)
    if kind is not None:
        bits = bits.view(kind)
    return ov.Tensor(bits.numpy(), list(tensor.shape), _TYPES[tensor.dtype])


def constant(tensor: Tensor, keep: list[Tensor]) -> Output:
    """A contiguous tensor as a constant on its memory, which is appended to ``keep``: hold it as long as the constant.

    The CPU plugin takes infinities of bfloat16 constants for finite numbers, those that it folds too. A tensor that has
    some is a constant of float32, which each run converts behind an op that is never folded: a roll by no places.
    """
    if tensor.dtype is not torch.bfloat16 or not _has_infinities(tensor):
        keep.append(tensor)
        return Constant(shared(tensor), True).output(0)
    held = torch.atleast_1d(tensor.float())
    keep.append(held)
    none = Constant(ov.Type.i64, ov.Shape([1]), [0])
    made = op.convert(op.roll(Constant(shared(held), True), none, none), ov.Type.bf16)
    return made.output(0) if tensor.dim() else op.squeeze(made, none).output(0)


def _has_infinities(tensor: Tensor) -> bool:
    if not tensor.numel():
        return False
    ends = torch.stack(
        tensor.aminmax()
    )  # reads once and makes nothing of the tensor's size; NaN where there is one
    return bool(ends.isinf().any()) or (bool(ends.isnan().any()) and bool(tensor.isinf().any()))


def copied(tensor: ov.Tensor, dtype: torch.dtype) -> Tensor:
    """A torch tensor with the values of an OpenVINO tensor."""
    data: Any = tensor.data
    if dtype in _BITS:
        data = data.view("int16")
    return torch.from_numpy(data.copy()).view(dtype).reshape(list(tensor.shape))
