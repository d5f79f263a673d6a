"""Convert between torch's and OpenVINO's dtypes and tensors, without copies if possible."""

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from openvino.op import Constant
from torch import Tensor

from dlinfer.vendor.openvino.int_ranges.kept import Kept

KEPT = Kept("OpenVINO", bits=32, cast=2**24)
"""The CPU plugin's limits: it keeps 32 bits of int64.

It casts floats to integers through float32, which is exact only up to 2**24."""

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
"""OpenVINO's 16-bit floating types -> torch's."""

# numpy has no bfloat16: its bits are passed as integers.
_BITS = {torch.bfloat16: torch.int16}


def refusal(dtype: torch.dtype) -> str | None:
    """Return a reason to refuse tensors of a dtype; None if OpenVINO takes them."""
    if dtype is torch.float64:
        return "it uses float64, which OpenVINO's plugins compute in float32"
    return None if dtype in _TYPES else f"it uses dtype {str(dtype).removeprefix('torch.')}"


def type_of(dtype: torch.dtype) -> ov.Type:
    """Return OpenVINO's type for a dtype. Raises KeyError for a dtype that ``refusal`` refuses."""
    return _TYPES[dtype]


def shared(tensor: Tensor) -> ov.Tensor:
    """Return an OpenVINO tensor on a contiguous CPU tensor's memory. The caller must keep the torch tensor alive."""
    bits = tensor.detach()
    kind = _BITS.get(tensor.dtype)
    if kind is not None:
        bits = bits.view(kind)
    return ov.Tensor(bits.numpy(), list(tensor.shape), _TYPES[tensor.dtype])


def constant(tensor: Tensor, keep: list[Tensor]) -> Output:
    """Return a constant on a contiguous tensor's memory, and append to ``keep`` the tensor that owns this memory.

    The CPU plugin makes infinities in bfloat16 constants finite, also when it folds constants. So a bfloat16 tensor
    with infinities becomes a float32 constant. The model converts this constant at each call, after a roll by 0, which
    is never folded."""
    if tensor.dtype is not torch.bfloat16 or not _has_infinities(tensor):
        keep.append(tensor)
        return Constant(shared(tensor), True).output(0)
    held = torch.atleast_1d(tensor.float())
    keep.append(held)
    none = Constant(ov.Type.i64, ov.Shape([1]), [0])
    converted = op.convert(op.roll(Constant(shared(held), True), none, none), ov.Type.bf16)
    return converted.output(0) if tensor.dim() else op.squeeze(converted, none).output(0)


def _has_infinities(tensor: Tensor) -> bool:
    if not tensor.numel():
        return False
    ends = torch.stack(tensor.aminmax())  # one pass without a copy; NaN if there is one
    return bool(ends.isinf().any()) or (bool(ends.isnan().any()) and bool(tensor.isinf().any()))
