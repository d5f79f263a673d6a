"""Linear layers with a 4-bit weight on CPU, without a float copy of the weight."""

import torch
from torch import Tensor

from dlinfer import settings
from dlinfer.ops.quantised.packing import AWQ, MXFP4, Packing
from dlinfer.vendor.cpu.compiled import compiled

_WIDENED_WORDS = 64  # words of a row that are dequantised at a time, 8 columns each


def native_matmul() -> str:
    """Return the name of the C++ kernel. It rounds activations to int8 only if DLINFER_CPU_ACTIVATIONS allows that."""
    rounds = settings.current().cpu_activations == "int8"
    return "weight_quant_matmul_int8" if rounds else "weight_quant_matmul"


def weight_quant_matmul(
    x: Tensor, qweight: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    floats = (x, scales) if bias is None else (x, scales, bias)
    fits = all(tensor.dtype is not torch.float64 for tensor in floats)
    kernel = compiled(native_matmul(), x, qweight) if fits else None
    if kernel is not None:
        return kernel(x, qweight, scales, offset, bias, group_size)
    return _widened(x, AWQ.of_groups(group_size), qweight, scales, offset, bias)


def mxfp4_matmul(x: Tensor, qweight: Tensor, scales: Tensor) -> Tensor:
    """Return x [rows, in_features] times a weight in the format ``ops.quantised.packing.MXFP4``, in x's dtype."""
    fits = x.dtype is not torch.float64 and scales.dtype is not torch.float64
    kernel = compiled("mxfp4_matmul", x, qweight) if fits else None
    if kernel is not None:
        return kernel(x, qweight, scales, MXFP4.group_size)
    return _widened(x, MXFP4, qweight, scales, None, None)


def _widened(
    x: Tensor, packing: Packing, qweight: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return x times the weight, plus bias, by torch. A few columns of the weight are dequantised at a time."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts, wide_x = [], x.to(wide)
    for first in range(0, qweight.shape[1], _WIDENED_WORDS):
        words = slice(first, first + _WIDENED_WORDS)
        columns = slice(first * packing.per_word, (first + _WIDENED_WORDS) * packing.per_word)
        zeros = None if offset is None else offset[:, words]
        part = wide_x @ packing.dequantise(qweight[:, words], scales[:, columns], zeros, wide)
        parts.append((part if bias is None else part + bias[columns]).to(x.dtype))
    return torch.cat(parts, -1) if parts else x.new_empty((*x.shape[:-1], 0))
