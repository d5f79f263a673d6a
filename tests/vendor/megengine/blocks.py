"""The blocks of the engine's tests: a gated MLP, attention with norm and rotation-free heads, and a ViT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Perceptron(nn.Module):
    """A norm and a gated MLP with a residual sum."""

    def __init__(self, size: int = 64, inner: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * F.gelu(self.up(normed)))


class Attention(nn.Module):
    """RMSNorm, causal attention of several heads and a residual sum, as decoders have them."""

    def __init__(self, size: int = 64, heads: int = 4, kv_heads: int = 4) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, size // heads
        self.weight = nn.Parameter(torch.rand(size))
        self.q = nn.Linear(size, size)
        self.kv = nn.Linear(size, 2 * kv_heads * self.head)
        self.out = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        q = self.q(normed).view(batch, length, self.heads, self.head).transpose(1, 2)
        k, v = (
            self.kv(normed).view(batch, length, 2, self.kv_heads, self.head).permute(2, 0, 3, 1, 4).unbind(0)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, size))


class VisionBlock(nn.Module):
    """Patches by a convolution, a class token, positions, attention written out, an MLP, a classifier."""

    def __init__(self, size: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, size, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, size))
        self.positions = nn.Parameter(torch.randn(1, 17, size))
        self.first, self.second, self.last = nn.LayerNorm(size), nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.classes = nn.Linear(size, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        batch, length, size = x.shape
        heads = self.qkv(self.first(x)).reshape(batch, length, 3, self.heads, size // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * (size // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, size))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return self.classes(self.last(x)[:, 0])
