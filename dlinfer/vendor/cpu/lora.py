"""LoRA on CPU: two matrix products for each adapter in a batch."""

import torch
from torch import Tensor

from dlinfer.ops.linear.lora import check_adapters


def lora_linear(
    base: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    adapter_ids: Tensor,
) -> Tensor:
    present = check_adapters(a, starts, ranks, adapter_ids)
    out = base.clone(memory_format=torch.contiguous_format)
    for adapter in present:
        start, rank = int(starts[adapter]), int(ranks[adapter])
        low, high = a[start : start + rank], b[start : start + rank]
        scaling = float(scalings[adapter])
        if present == [adapter] and bool((adapter_ids == adapter).all()):
            out += (x @ low.t() @ high).mul_(scaling)
            continue
        rows = (adapter_ids == adapter).nonzero()[:, 0]
        out.index_add_(0, rows, (x.index_select(0, rows) @ low.t() @ high).mul_(scaling))
    return out
