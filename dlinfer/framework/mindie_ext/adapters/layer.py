"""A linear layer with slots for LoRA adapters. A slot holds the weights of one adapter."""

import torch
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.framework.mindie_ext.adapters.weights import LoraWeights


class Batch(nn.Module):
    """The adapter of each token in the current forward. All LoRA layers of a model share one Batch.

    ids: [capacity] int64, the index of each token's adapter; -1 for no adapter. The tensor is written in place, because
    compiled graphs read it.
    """

    ids: Tensor

    def __init__(self, capacity: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("ids", torch.full((capacity,), -1, device=device), persistent=False)
        self.is_used = False


class LoraLinear(nn.Module):
    """Replaces a linear layer: calls the replaced layer, then adds the product of each token's adapter
    (``lora_linear``).

    The layer has ``loras`` slots for adapters of rank ``rank`` or less. All slots together take loras * rank *
    (in_features + out_features) elements. The weights of the replaced layer are not copied.
    """

    a: Tensor
    b: Tensor
    starts: Tensor
    ranks: Tensor
    scalings: Tensor

    def __init__(self, base: nn.Linear, batch: Batch, loras: int, rank: int) -> None:
        super().__init__()
        self.base, self.batch, self.rank = base, batch, rank
        weight = base.weight
        device = weight.device
        for name, tensor in (
            ("a", weight.new_zeros(loras * rank, base.in_features)),
            ("b", weight.new_zeros(loras * rank, base.out_features)),
            ("starts", torch.arange(loras, device=device) * rank),
            ("ranks", torch.zeros(loras, dtype=torch.int64, device=device)),
            ("scalings", torch.zeros(loras, device=device)),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def put(self, place: int, weights: LoraWeights | None) -> None:
        """Write an adapter's weights into a slot. None empties the slot. place: the slot's index."""
        rank = 0 if weights is None else weights.a.shape[0]
        self.ranks[place] = rank
        if weights is not None:
            start = place * self.rank
            self.a[start : start + rank] = weights.a.to(self.a.dtype)
            self.b[start : start + rank] = weights.b.T.to(self.b.dtype)
            self.scalings[place] = weights.scaling

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features]. x: [..., in_features], one row for each token of the batch."""
        base = self.base(x)
        # Compiled graphs always add: the flag changes from step to step.
        if not torch.compiler.is_compiling() and not self.batch.is_used:
            return base
        flat, rows = base.flatten(0, -2), x.flatten(0, -2)
        ids = self.batch.ids[: rows.shape[0]]
        out = ops.lora_linear(flat, rows, self.a, self.b, self.starts, self.ranks, self.scalings, ids)
        return out.view(base.shape)
