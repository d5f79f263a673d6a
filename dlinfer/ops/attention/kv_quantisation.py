"""Quantised KV caches: the storage of keys and values in 8 or 4 bits. The formats are LMDeploy's.

``quant_bits`` is LMDeploy's ``quant_policy``. For head size D the caches are:

- 8, int8: uint8 [blocks, block_size, kv_heads, D];
- 4, int4: uint8 [blocks, block_size, kv_heads, D / 2]; byte i holds element i in its low four bits and element
  i + D / 2 in its high four bits;
- 16, fp8: float8_e4m3fn [blocks, block_size, kv_heads, D];
- 17, fp8: float8_e5m2 [blocks, block_size, kv_heads, D].

Formats 8 and 4 are asymmetric. Each token's vector of each head has its own scale and zero. A second tensor for each
cache stores these: [blocks, block_size, kv_heads, 2], of the model's dtype. With ``levels`` = 255 or 15 and x the
vector in float32::

    scale = max((max x - min x) / levels, max |x| / 2^15), or 1 where that is 0
    zero = -min x / scale
    code = clamp(floor(x / scale + zero + 1/2), 0, levels)          x is read as (code - zero) * scale

This is LMDeploy's arithmetic (``pytorch/kernels/cuda/fill_kv_cache.py``) except in three cases, where LMDeploy's gives
NaN or wraps around. First, a vector of equal elements has a scale other than 0. Second, the bound max |x| / 2^15 of the
scale keeps the zero finite in float16. Third, codes are clamped, and are computed from the stored scale and zero, which
are rounded to the model's dtype. A value that is read differs from x by at most scale / 2 + 1.5 eps max |x|, with the
eps of the model's dtype. A vector with an infinity or NaN is read as NaN.

Formats 16 and 17 have one float32 scale for a whole cache. The caller passes this scale (LMDeploy passes 1), and no op
writes it::

    code = x / scale, clamped to the format's largest finite numbers and rounded to nearest;  x is read as code * scale
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.ops.attention.kv_cache import canonical
from dlinfer.ops.core.checks import Rules

INT4, INT8, FP8_E4M3, FP8_E5M2 = 4, 8, 16, 17

STORED = {
    INT4: torch.uint8,
    INT8: torch.uint8,
    FP8_E4M3: torch.float8_e4m3fn,
    FP8_E5M2: torch.float8_e5m2,
}
"""``quant_bits`` -> dtype of the caches."""

_LARGEST_ZERO = 1 << 15


def is_scaled_by_token(quant_bits: int) -> bool:
    """Return whether a format has a scale and a zero for each token and head.

    The op that writes the cache computes both.
    """
    return quant_bits in (INT4, INT8)


def stored_size(head_size: int, quant_bits: int) -> int:
    """Return the size of the last dimension of a quantised cache. ``head_size`` must be even for int4."""
    return head_size // 2 if quant_bits == INT4 else head_size


def read_size(cache: Tensor, quant_bits: int) -> int:
    """Return the head size of the vectors in a quantised cache [..., kv_heads, stored size]."""
    return cache.shape[-1] * 2 if quant_bits == INT4 else cache.shape[-1]


# --- the arithmetic


def quantise(x: Tensor, quant_bits: int, scales_zeros: Tensor) -> tuple[Tensor, Tensor | None]:
    """Quantise x [..., head_size], computed in float32 (float64 for float64).

    Return the codes [..., stored size], and the new scales and zeros [..., 2], or None for fp8.
    scales_zeros: for int8 and int4 the cache's scales and zeros; only their dtype is used. For fp8 the scale, one
        element.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not is_scaled_by_token(quant_bits):
        limits = torch.finfo(STORED[quant_bits])
        scaled = wide / scales_zeros.to(wide.dtype).reshape(())
        return scaled.clamp_(limits.min, limits.max).to(STORED[quant_bits]), None
    levels = (1 << quant_bits) - 1
    low, high = torch.aminmax(wide, dim=-1, keepdim=True)
    scale = torch.maximum((high - low) / levels, torch.maximum(-low, high) / _LARGEST_ZERO)
    scale = scale.to(scales_zeros.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (-low / scale.to(wide.dtype)).to(scales_zeros.dtype)
    codes = (wide / scale.to(wide.dtype)).add_(zero.to(wide.dtype)).add_(0.5).floor_()
    codes = codes.clamp_(0, levels).nan_to_num_(0.0).to(torch.uint8)
    if quant_bits == INT4:
        first, second = codes.chunk(2, dim=-1)
        codes = first | (second << 4)
    return codes, torch.cat([scale, zero], dim=-1)


def dequantise(codes: Tensor, quant_bits: int, scales_zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of codes [..., stored size]: a new tensor [..., head_size] of ``dtype``.

    scales_zeros: [..., 2], or for fp8 the scale, one element. Computed in float32 and rounded once.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if not is_scaled_by_token(quant_bits):
        # Look the 256 numbers up in a table: torch widens fp8 element by element, which takes ten times as long.
        every = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype)
        table = every.to(wide).mul_(scales_zeros.to(wide).reshape(())).to(dtype)
        return table.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)
    if quant_bits == INT4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    scale, zero = torch.split(scales_zeros.to(wide), 1, dim=-1)
    return codes.to(wide).sub_(zero).mul_(scale).to(dtype)


# --- the Python calls

Scales = Tensor | Sequence[Tensor | None] | None
"""Scales as LMDeploy passes them: a tensor, or a list that is empty if nothing is quantised."""


def scales_of(
    op: str, quant_bits: int | None, k_scales_zeros: Scales, v_scales_zeros: Scales, *others: object
) -> tuple[Tensor, Tensor] | None:
    """Return two tensors, the scales of the keys and of the values; None if the call's caches are not quantised.

    others: the call's arguments for formats that are not supported; each must be None.
    Raises UnsupportedFeatureError in three cases: one of ``others`` is not None; ``quant_bits`` is unknown; or the call
    has scales without ``quant_bits``, or ``quant_bits`` without scales.
    """
    scales = [_tensors(argument) for argument in (k_scales_zeros, v_scales_zeros)]
    if not quant_bits and not any(scales) and all(other is None for other in others):
        return None
    named = f"a quantised KV cache (quant_bits={int(quant_bits or 0)})"
    if any(other is not None for other in others) or any(len(argument) > 1 for argument in scales):
        raise _refuse(
            op, f"{named} with static scales", "pass one tensor as k_scales_zeros and one as v_scales_zeros"
        )
    if not quant_bits:
        raise _refuse(op, f"{named} with scales", "pass quant_bits, the format of the quantised caches")
    if quant_bits not in STORED:
        known = ", ".join(map(str, STORED))
        raise _refuse(op, named, f"set the engine's quant_policy to one of {known}, or to 0")
    if not all(scales):
        advice = "pass both tensors, in the format of LMDeploy's cache engine"
        raise _refuse(op, f"{named} without k_scales_zeros and v_scales_zeros", advice)
    return scales[0][0], scales[1][0]


def _tensors(scales: Scales) -> list[Tensor]:
    if isinstance(scales, Tensor):
        return [scales]
    return [scale for scale in scales or () if scale is not None]


def _refuse(op: str, feature: str, advice: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature=feature, where=f"dlinfer.ops.{op}", advice=advice)


# --- argument rules


def check_format(rules: Rules, quant_bits: int) -> None:
    """Raise OpArgumentError unless ``quant_bits`` is a known format.

    If ``quant_bits`` is symbolic, torch adds a guard on its value, because dtypes and sizes depend on it.
    """
    rules.require(int(quant_bits) in STORED, "quant_bits", "4, 8, 16 or 17", lambda: quant_bits)


def check_quantised_cache(
    rules: Rules,
    name: str,
    cache: Tensor,
    scales_zeros: Tensor,
    quant_bits: int,
    model_name: str,
    model: Tensor,
) -> None:
    """Check the op's arguments ``{name}_cache`` and ``{name}_scales_zeros``. name: "k" or "v".

    model: the tensor argument [tokens, heads, head_size], such as q or k, that determines the head size and device of
        the cache, and the dtype of its scales.
    model_name: the name of that argument.
    """
    head_size = model.shape[2]
    cache_name, scales_name = f"{name}_cache", f"{name}_scales_zeros"
    dtype = STORED[int(quant_bits)]
    if cache.dtype is not dtype:
        raise rules.error(cache_name, f"a tensor of {dtype} for quant_bits={quant_bits}", cache.dtype)
    rules.same_device(cache_name, cache, model_name, model)
    rules.rank(cache_name, cache, 4)
    slots = canonical(cache)
    if quant_bits == INT4:
        rules.require(
            head_size % 2 == 0, model_name, "an even head size for quant_bits=4", lambda: int(head_size)
        )
    why = f"the stored size of the head size of {model_name} with quant_bits={quant_bits}"
    rules.size(cache_name, slots, 3, stored_size(head_size, quant_bits), why)
    rules.same_device(scales_name, scales_zeros, model_name, model)
    if not is_scaled_by_token(quant_bits):
        if scales_zeros.dtype not in (torch.float32, torch.float64):
            raise rules.error(scales_name, "a float32 scale", scales_zeros.dtype)
        rules.require(scales_zeros.numel() == 1, scales_name, "one scale", lambda: tuple(scales_zeros.shape))
        return
    rules.like(scales_name, scales_zeros, model_name, model)
    rules.rank(scales_name, scales_zeros, 4)
    scales = canonical(scales_zeros)
    for dim, what in enumerate(("blocks", "block size", "kv heads")):
        rules.size(scales_name, scales, dim, slots.shape[dim], f"the {what} of {cache_name}")
    rules.size(scales_name, scales, 3, 2, "a scale and a zero")


def check_apart(rules: Rules, k_cache: Tensor, v_cache: Tensor, quant_bits: int) -> None:
    """Raise OpArgumentError if int8 or int4 caches of keys and values share memory.

    The caches of latent attention share memory. The check compares addresses, so only kernels call it; fake tensors
    have no addresses.
    """
    if is_scaled_by_token(quant_bits) and k_cache.numel() and v_cache.numel():
        rules.require(
            k_cache.data_ptr() != v_cache.data_ptr(),
            "v_cache",
            f"memory apart from k_cache, because quant_bits={quant_bits} has separate scales for keys "
            "and values",
            lambda: "a part of k_cache",
        )
