"""Norms, rotation, activation and linear on CPU, rounded where HF transformers rounds.

``torch.nn.functional.rms_norm`` is not used, because it rounds only once, after the weight. Linear layers, norms,
rotation and silu have C++ kernels (csrc/). For the few rows of a decode step these take a half to a quarter of torch's
time. Where a C++ kernel cannot be used, torch computes the same, as a fallback. In compiled graphs inductor's loops may
compute rotation and activation."""

import torch
from torch import Tensor
from torch.nn import functional

from dlinfer.ops.core.checks import FLOATS
from dlinfer.vendor.cpu.compiled import compiled
from dlinfer.vendor.cpu.gated import gated


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    kernel = compiled("rms_norm", x, weight) if x.dtype in FLOATS else None
    return _rms_norm(x, weight, eps) if kernel is None else kernel(x, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # vecdot keeps the squares out of memory; writing them is most of the time of square().mean() in a prefill
    scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze_(-1)
    normalised = wide * scale if wide is x else wide.mul_(scale)
    return normalised.to(x.dtype).contiguous().mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kernel = compiled("add_rms_norm", x, residual, weight) if x.dtype in FLOATS else None
    if kernel is not None:
        return kernel(x, residual, weight, eps)
    total = (x + residual).contiguous()
    return _rms_norm(total, weight, eps), total


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    kernel = compiled("apply_rotary_pos_emb", q, k) if q.dtype in FLOATS else None
    if kernel is not None:
        return kernel(q, k, cos, sin)
    per_token = (*q.shape[:-2], 1, q.shape[-1])
    first, second = sin.reshape(per_token).chunk(2, dim=-1)
    signed = torch.cat((-first, second), dim=-1)  # moves the sign of rotate_half to the smaller tensor
    cos = cos.reshape(per_token)
    return _rotate(q, cos, signed), _rotate(k, cos, signed)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1).mul_(signed_sin).add_(x * cos)


def apply_rotary_pos_emb_interleaved(
    native_input: Tensor, cos: Tensor, sin: Tensor, return_native_layout: bool
) -> Tensor:
    half = native_input.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second = native_input[..., 0::2], native_input[..., 1::2]
    rotated = native_input.new_empty(native_input.shape)
    halves = rotated.chunk(2, dim=-1) if return_native_layout else (rotated[..., 0::2], rotated[..., 1::2])
    torch.mul(first, cos, out=halves[0]).sub_(second * sin)
    torch.mul(second, cos, out=halves[1]).add_(first * sin)
    return rotated


def silu_and_mul(x: Tensor) -> Tensor:
    kernel = compiled("silu_and_mul", x) if x.dtype in FLOATS else None
    if kernel is not None:
        return kernel(x)
    gate, up = x.chunk(2, dim=-1)
    return gated(functional.silu(gate), up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    kernel = compiled("linear", x, weight) if x.dtype in FLOATS else None
    return functional.linear(x, weight, bias) if kernel is None else kernel(x, weight, bias)


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    # The sums are over the outer dimensions of [n, n, rows], so each step runs over whole rows of memory.
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).flatten(0, -3).permute(1, 2, 0)
    matrices = wide.softmax(1).add_(eps)
    matrices.div_(matrices.sum(0, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        matrices.div_(matrices.sum(1, keepdim=True).add_(eps))
        matrices.div_(matrices.sum(0, keepdim=True).add_(eps))
    return matrices.permute(2, 0, 1).reshape(scores.shape).to(scores.dtype).contiguous()
