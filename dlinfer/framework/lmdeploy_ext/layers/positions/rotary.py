"""Rotary tables with the frequencies that transformers computes, for every rope type that both know.

LMDeploy's own dlinfer builder takes ``max_position_embeddings`` for Llama 3's original length, has no longrope, and
lets the longest sequence of a batch choose the frequencies of all. Here each token has frequencies of its own:
dynamic and longrope read the length that governs it from a second row of ``position_ids`` (``rope_lengths.py``).

The formulas are those of ``transformers.modeling_rope_utils``. Frequencies and angles are float32, as there.
"""

import math
from typing import Any

import torch
from lmdeploy.pytorch.backends.dlinfer.apply_rotary_emb import DlinferApplyRotaryEmbImpl
from lmdeploy.pytorch.backends.rotary_embedding import RopeType
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.positions.rope_parameters import (
    longrope_scale,
    yarn_scale,
)


def base_frequencies(dim: int, base: float) -> Tensor:
    """1 / base^(2i / dim): float32 [dim / 2], radians per position."""
    return 1.0 / (base ** _exponents(dim))


def llama3_frequencies(spec: Any) -> Tensor:
    """Long waves slowed down by the factor, short ones kept, those between them blended (Llama 3.1): [dim / 2]."""
    params, factor = spec.llama3_params, spec.scaling_factor
    frequencies = base_frequencies(spec.dim, spec.base)
    original = params.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    long_wave, short_wave = original / params.low_freq_factor, original / params.high_freq_factor
    slowed = torch.where(wavelengths > long_wave, frequencies / factor, frequencies)
    blend = (original / wavelengths - params.low_freq_factor) / (
        params.high_freq_factor - params.low_freq_factor
    )
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (wavelengths >= short_wave) & (wavelengths <= long_wave)
    return torch.where(between, blended, slowed)


def yarn_frequencies(spec: Any) -> Tensor:
    """Extrapolated below a range of dimensions, interpolated above it, with a ramp between them: [dim / 2].

    Source: YaRN (Peng et al., 2023, arXiv:2309.00071), section 3.2. ``spec.max_position_embeddings`` is the original
    length: LMDeploy puts it there.
    """
    params, dim = spec.yarn_params, spec.dim

    def dimension_of(rotations: float) -> float:
        """The dimension that turns so often within the original length."""
        return (
            dim
            * math.log(spec.max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(spec.base))
        )

    low, high = dimension_of(params.beta_fast or 32), dimension_of(params.beta_slow or 1)
    if params.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers does, against a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = spec.base ** _exponents(dim)
    keep = 1 - ramp
    return 1.0 / (spec.scaling_factor * periods) * (1 - keep) + 1.0 / periods * keep


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


class RotaryTables(nn.Module):
    """cos and sin of fixed frequencies.

    inv_freq: float32 [dim / 2], radians per position. scale: factor of cos and sin. LMDeploy's mrope wrapper reads
    ``inv_freq``, ``scaling_factor`` and ``attention_scaling`` by these names.
    """

    inv_freq: Tensor
    scaling_factor = 1.0

    def __init__(self, inv_freq: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_scaling = scale

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: any tensor of the wanted dtype and device. position_ids: [B, N]. Returns cos and sin, [B, N, dim]."""
        angles = position_ids.unsqueeze(-1).float() * self.inv_freq.to(x.device)
        return _tables(angles, self.attention_scaling, x.dtype)


class DynamicTables(nn.Module):
    """Dynamic NTK scaling: beyond the trained length the base grows with the length that governs a token.

    The names are LMDeploy's: its mrope wrapper knows by ``_ntk_inv_freq`` that frequencies are not fixed.
    """

    inv_freq: Tensor
    exponents: Tensor

    def __init__(self, dim: int, base: float, factor: float, trained_length: int) -> None:
        super().__init__()
        self.dim, self.base, self.factor, self.trained_length = dim, base, factor, trained_length
        self.register_buffer("inv_freq", base_frequencies(dim, base), persistent=False)
        self.register_buffer("exponents", _exponents(dim), persistent=False)

    def _ntk_inv_freq(self, lengths: Tensor) -> Tensor:
        """lengths: int64 [N]. Returns float32 [N, dim / 2]."""
        growth = (self.factor * lengths / self.trained_length) - (self.factor - 1)
        base = self.base * growth ** (self.dim / (self.dim - 2))
        scaled = 1.0 / (base.unsqueeze(-1) ** self.exponents.to(lengths.device))
        return torch.where(
            lengths.unsqueeze(-1) > self.trained_length, scaled, self.inv_freq.to(lengths.device)
        )

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: int64 [2, N], positions and the lengths that govern them. Returns cos and sin, [1, N, dim]."""
        positions, lengths = _split(position_ids)
        angles = positions.unsqueeze(-1).float() * self._ntk_inv_freq(lengths)
        return _tables(angles.unsqueeze(0), 1.0, x.dtype)


class LongRopeTables(nn.Module):
    """LongRoPE: one set of factors up to the original length, another one beyond it (arXiv:2402.13753).

    short_factor, long_factor: the frequencies that these give, float32 [dim / 2]. scales: (short, long) factors of cos
    and sin.
    """

    short_factor: Tensor
    long_factor: Tensor

    def __init__(self, dim: int, base: float, params: Any, scales: tuple[float, float]) -> None:
        super().__init__()
        self.original_length = params.original_max_position_embeddings
        self.scales = scales
        periods = base ** _exponents(dim)
        for name, factors in (("short_factor", params.short_factor), ("long_factor", params.long_factor)):
            inv_freq = 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
            self.register_buffer(name, inv_freq, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: int64 [2, N], positions and the lengths that govern them. Returns cos and sin, [1, N, dim]."""
        positions, lengths = _split(position_ids)
        is_long = (lengths > self.original_length).unsqueeze(-1)
        inv_freq = torch.where(is_long, self.long_factor.to(x.device), self.short_factor.to(x.device))
        angles = (positions.unsqueeze(-1).float() * inv_freq).unsqueeze(0)
        short, long = self.scales
        return _tables(angles, short if short == long else torch.where(is_long, long, short), x.dtype)


def _split(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(
        position_ids.shape[0] == 2, lambda: "this rope type needs positions and their lengths, [2, N]"
    )
    return position_ids[0], position_ids[1]


def _tables(angles: Tensor, scale: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _longrope(spec: Any) -> LongRopeTables:
    params = spec.longrope_params
    short, long = params.short_mscale, params.long_mscale
    if short is None or long is None:
        factor = spec.max_position_embeddings / params.original_max_position_embeddings
        short = long = longrope_scale(factor, params.original_max_position_embeddings)
    return LongRopeTables(spec.dim, spec.base, params, (short, long))


def _linear(spec: Any) -> RotaryTables:
    return RotaryTables(base_frequencies(spec.dim, spec.base) / spec.scaling_factor)


def _dynamic(spec: Any) -> DynamicTables:
    return DynamicTables(spec.dim, spec.base, spec.scaling_factor, spec.max_position_embeddings)


_BUILDERS = {
    RopeType.Default: _linear,
    RopeType.LinearScaling: _linear,
    RopeType.DynamicNTKScaling: _dynamic,
    RopeType.Llama3: lambda spec: RotaryTables(llama3_frequencies(spec)),
    RopeType.Yarn: lambda spec: RotaryTables(yarn_frequencies(spec), yarn_scale(spec)),
    RopeType.LongRoPEScaling: _longrope,
}


def from_spec(spec: Any) -> nn.Module:
    """Build the tables of LMDeploy's RotaryEmbeddingBuildSpec. Raises UnsupportedFeatureError for other types."""
    build = _BUILDERS.get(spec.emb_type)
    if build is None:
        raise refuse(f"rope type {spec.emb_type.name}", "use another model")
    return build(spec)


class ApplyRotary(DlinferApplyRotaryEmbImpl):
    """Rotates the first features of a head where the tables are narrower than it, and keeps the rest."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        inplace: bool = True,
        complex_mode: bool = False,
        return_native_layout: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """query [N, Hq, D], key [N, Hkv, D]; cos, sin [N, d] with d <= D. Returns rotated query and key, [N, H, D]."""
        rotated = cos.shape[-1]
        if complex_mode:
            return super().forward(query, key, cos, sin, inplace, complex_mode, return_native_layout)
        if rotated == query.shape[-1]:
            return super().forward(query, key, cos, sin, inplace)
        parts = super().forward(query[..., :rotated], key[..., :rotated], cos, sin)
        return tuple(
            torch.cat((part, whole[..., rotated:]), dim=-1)
            for part, whole in zip(parts, (query, key), strict=True)
        )  # pyright: ignore[reportReturnType]
