"""A block of DeepSeek-V2's latent attention as LMDeploy calls it when it decodes: one head of 512 + 64 numbers."""

import torch
from torch import Tensor, nn

from tests.vendor.ascend.graph import models
from tests.vendor.ascend.graph.models import BLOCK, HIDDEN, gamma, parameter

HEADS, LATENT, ROPE = 4, 512, 64
SIZE = LATENT + ROPE


class LatentAttention(nn.Module):
    """A norm, queries and the new latent, the rotation of their last numbers, the cache's write and its attention.

    Values are a view of the keys. Queries are absorbed: their product with the latent is one of 512 numbers.
    """

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.norms = nn.ParameterList(gamma(generator) for _ in range(layers))
        packed = (HEADS + 1) * SIZE
        self.packed = nn.ParameterList(parameter(generator, packed, HIDDEN) for _ in range(layers))
        self.outs = nn.ParameterList(parameter(generator, HIDDEN, HEADS * LATENT) for _ in range(layers))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        table: Tensor,
        lengths: Tensor,
        *caches: Tensor,
    ) -> Tensor:
        for layer, cache in enumerate(caches):
            normed = torch.ops.dlinfer.rms_norm(x, self.norms[layer], 1e-5)
            packed = torch.ops.dlinfer.linear(normed, self.packed[layer], None).view(-1, HEADS + 1, SIZE)
            q, k = packed.split([HEADS, 1], 1)
            (query, q_rope), (new, k_rope) = (one.split([LATENT, ROPE], -1) for one in (q, k))
            q_rope, k_rope = torch.ops.dlinfer.apply_rotary_pos_emb(q_rope, k_rope, cos, sin)
            q, k = torch.cat((query, q_rope), -1), torch.cat((new, k_rope), -1)
            values = cache[..., :LATENT]
            torch.ops.dlinfer.fill_kv_cache(k, new, cache, values, slots)
            out = x.new_empty(x.shape[0], HEADS, LATENT)
            self.attend(q, cache, values, (table, lengths), out)
            x = x + torch.ops.dlinfer.linear(out.view(-1, HEADS * LATENT), self.outs[layer], None)
        return x

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, step: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        table, lengths = step
        sizes = (BLOCK, lengths, 256, HEADS, 1)
        torch.ops.dlinfer.paged_decode_attention(
            q, keys, values, table, *sizes, out, SIZE**-0.5, -1, 0.0, None, None
        )


def inputs(layers: int, lengths: list[int], dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """Of ``LatentAttention``, for sequences of these lengths; one of 0 is padding (``models.inputs``)."""
    *rest, _, _ = models.inputs(1, lengths, dtype)
    generator = torch.Generator().manual_seed(len(lengths))
    caches = []
    for _ in range(layers):
        cache = torch.randn(9, BLOCK, 1, SIZE, generator=generator)
        for row, length in enumerate(lengths):
            owned = rest[4][row, : -(-length // BLOCK)].long()
            seen = cache[owned].flatten(0, 1)
            seen[length:] = torch.nan  # behind the end
            cache[owned] = seen.view(-1, BLOCK, 1, SIZE)
        caches.append(cache.to(dtype))
    return [*rest, *caches]
