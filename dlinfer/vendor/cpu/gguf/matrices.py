"""Kernels for matrices in GGUF's blocks: matrix products, mixtures of experts and embedding, in C++ (csrc/gguf)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer import ops
from dlinfer.ops.core.checks import FLOATS
from dlinfer.ops.moe.routing import check_ids
from dlinfer.ops.quantised import gguf
from dlinfer.ops.quantised.embedding_gguf import check_indices
from dlinfer.vendor.cpu.compiled import compiled
from dlinfer.vendor.cpu.four_bit.experts import routed

_PIECE = 1 << 20
"""How many numbers are unpacked at a time without the C++ kernel."""


def linear_gguf(
    x: Tensor, weight: Tensor, bias: Tensor | None, types: Sequence[int], rows: Sequence[int]
) -> Tensor:
    kernel = compiled("linear_gguf", x) if x.dtype in FLOATS else None
    if kernel is not None:
        return kernel(x, weight, bias, types, rows)
    parts = [
        functional.linear(x, gguf.values(kind, some, x.dtype))
        for kind, blocks in gguf.matrices(weight, types, rows, x.shape[-1])
        for some in blocks.split(max(_PIECE // max(x.shape[-1], 1), 1))
    ]
    out = torch.cat(parts, -1) if parts else x.new_empty((*x.shape[:-1], 0))
    return out if bias is None else out.add_(bias)


def embedding_gguf(
    indices: Tensor, weight: Tensor, type: int, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    check_indices(indices, rows)
    kernel = compiled("embedding_gguf", indices, weight, dtype=dtype)
    if kernel is not None:
        return kernel(indices, weight, type, rows, columns, dtype)
    return ops.embedding_gguf.reference(indices, weight, type, rows, columns, dtype)


def fused_moe_gguf(
    hidden_states: Tensor,
    gate_up_weights: Tensor,
    down_weights: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    renormalize: bool,
    intermediate_size: int,
    gate_up_types: Sequence[int],
    down_type: int,
) -> Tensor:
    check_ids(topk_ids, gate_up_weights.shape[0], ops.fused_moe_gguf.rules)
    both, hidden = [intermediate_size] * 2, [hidden_states.shape[1]]

    def gate_up(x: Tensor, expert: int) -> Tensor:
        return linear_gguf(x, gate_up_weights[expert].contiguous(), None, gate_up_types, both)

    def down(x: Tensor, expert: int) -> Tensor:
        return linear_gguf(x, down_weights[expert].contiguous(), None, [down_type], hidden)

    return routed(hidden_states, topk_weights, topk_ids, renormalize, gate_up, down)
