"""bfloat16 matrices that are packed in 12 bits a number, on CPU: products and rows of them, in C++ (csrc/bf12)."""

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops import bf12
from dlinfer.ops.embedding_bf12 import check_indices
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.compiled import compiled


def pack(weight: Tensor) -> Tensor:
    """As ``dlinfer.ops.bf12.pack``, the same bytes, by all threads; in memory of its own, in large pages."""
    if weight.dtype is not torch.bfloat16 or weight.ndim != 2 or native.why_not() is not None:
        return bf12.pack(weight)
    return torch.ops.dlinfer_cpu.pack_bf12(weight)


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """As ``dlinfer.ops.bf12.unpack``."""
    if native.why_not() is not None:
        return bf12.unpack(packed, rows, columns)
    return torch.ops.dlinfer_cpu.unpack_bf12(packed, rows, columns)


def linear_bf12(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    # Of another dtype than the weight's x is a rare guest, and gets a copy of it.
    kernel = compiled("linear_bf12", x) if x.dtype is torch.bfloat16 else None
    if kernel is not None:
        return kernel(x, weight, bias, out_features)
    return functional.linear(x, unpack(weight, out_features, x.shape[-1]).to(x.dtype), bias)


def embedding_bf12(indices: Tensor, weight: Tensor, rows: int, columns: int) -> Tensor:
    check_indices(indices, rows)
    kernel = compiled("embedding_bf12", indices)
    if kernel is not None and indices.dtype in (torch.int32, torch.int64):
        return kernel(indices, weight, rows, columns)
    return bf12.rows_of(weight, indices, rows, columns)
