"""A linear layer with a place for LoRA adapters."""

import torch
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.framework.mindie_ext.adapters.weights import LoraWeights


class Batch(nn.Module):
    """Which adapter each token of the current forward has. ids: [capacity] int64, -1 is none; written in place, so that
    a compiled graph reads what is current."""

    ids: Tensor

    def __init__(self, capacity: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("ids", torch.full((capacity,), -1, device=device), persistent=False)
        self.is_used = False


class LoraLinear(nn.Module):
    """Calls the linear layer that it stands in for, and ``lora_linear`` on what that gives.

    It holds places for ``loras`` adapters of up to ``rank`` rows: loras * rank * (in_features + out_features) numbers.
    The layer's own weights stay where they are.
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
        """Write an adapter into a place; None empties it."""
        rank = 0 if weights is None else weights.a.shape[0]
        self.ranks[place] = rank
        if weights is not None:
            start = place * self.rank
            self.a[start : start + rank] = weights.a.to(self.a.dtype)
            self.b[start : start + rank] = weights.b.T.to(self.b.dtype)
            self.scalings[place] = weights.scaling

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features], as many rows as the batch has tokens. Returns [..., out_features]."""
        base = self.base(x)
        if not torch.compiler.is_compiling() and not self.batch.is_used:  # a graph must not read the flag
            return base
        flat, rows = base.flatten(0, -2), x.flatten(0, -2)
        ids = self.batch.ids[: rows.shape[0]]
        out = ops.lora_linear(flat, rows, self.a, self.b, self.starts, self.ranks, self.scalings, ids)
        return out.view(base.shape)
