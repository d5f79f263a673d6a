"""Kernels for bfloat16 matrices packed in 12 bits a number: matrix products and embedding, in C++ (csrc/bf12)."""

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.quantised import bf12
from dlinfer.ops.quantised.embedding_bf12 import check_indices
from dlinfer.vendor.cpu.compiled import compiled


def pack(weight: Tensor) -> Tensor:
    """Return the same bytes as ``ops.quantised.bf12.pack``, but packed by all threads, in large memory pages."""
    fits = weight.dtype is torch.bfloat16 and weight.ndim == 2
    kernel = compiled("pack_bf12", weight) if fits else None
    return (kernel or bf12.pack)(weight)


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the [rows, columns] matrix that ``pack`` packed, as ``ops.quantised.bf12.unpack`` does."""
    kernel = compiled("unpack_bf12", packed, dtype=torch.bfloat16)
    return (kernel or bf12.unpack)(packed, rows, columns)


def linear_bf12(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    # x of another dtype than the weight's is rare; it gets a copy of the weight.
    kernel = compiled("linear_bf12", x) if x.dtype is torch.bfloat16 else None
    if kernel is not None:
        return kernel(x, weight, bias, out_features)
    return functional.linear(x, unpack(weight, out_features, x.shape[-1]).to(x.dtype), bias)


def embedding_bf12(indices: Tensor, weight: Tensor, rows: int, columns: int) -> Tensor:
    check_indices(indices, rows)
    kernel = compiled("embedding_bf12", indices, weight, dtype=torch.bfloat16)
    if kernel is not None:
        return kernel(indices, weight, rows, columns)
    return bf12.rows_of(weight, indices, rows, columns)
