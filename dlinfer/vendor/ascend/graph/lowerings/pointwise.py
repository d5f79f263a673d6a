"""Rotary embeddings and the gated activation."""

import torch
from torch import Tensor

from dlinfer.vendor.ascend import chips


def silu_and_mul(x: Tensor) -> Tensor:
    """Lower to ``SwiGlu``, which reads the two halves of the last dimension."""
    return torch.ops.npu.npu_swiglu(x, -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Lower to ``ApplyRotaryPosEmb`` of layout TND for head sizes 64 and 128, else to ``RotaryMul``.

    ``ApplyRotaryPosEmb`` writes into its arguments, so torchair passes copies (``TensorMove``).
    """
    size = q.shape[-1]
    tables = [table.reshape(-1, 1, size) for table in (cos, sin)]
    turned = [x if x.dim() == 3 else x.reshape(-1, x.shape[-2], size) for x in (q, k)]
    if size in chips.current().rope_sizes:
        out = torch.ops.npu.npu_apply_rotary_pos_emb(*turned, *tables, "TND", "half")
    else:
        out = [_turned(x, tables) for x in turned]
    return tuple(
        rotated if x.dim() == 3 else rotated.reshape(x.shape) for rotated, x in zip(out, (q, k), strict=True)
    )  # pyright: ignore[reportReturnType]


def _turned(x: Tensor, tables: list[Tensor]) -> Tensor:
    batched = (tensor.unsqueeze(0) for tensor in (x, *tables))
    return torch.ops.npu.npu_rotary_mul(*batched, "half").squeeze(0)
