"""Rotary tables with transformers' frequencies, for every rope type that LMDeploy and transformers have.

LMDeploy's own dlinfer builder takes ``max_position_embeddings`` for Llama 3's original length, and has no longrope. For
dynamic scaling it chooses the frequencies of a whole batch by the longest sequence. Here each token has its own
frequencies. Dynamic and longrope tables read a token's governing length from the second row of ``position_ids``
(``rope_lengths.py``).

Formulas are those of ``transformers.modeling_rope_utils``, in float32 as there.
"""

import math
from typing import Any

import torch
from lmdeploy.pytorch.backends.dlinfer.apply_rotary_emb import DlinferApplyRotaryEmbImpl
from lmdeploy.pytorch.backends.rotary_embedding import RopeType
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.positions.rope_parameters import longrope_scale, yarn_scale


def base_frequencies(dim: int, base: float) -> Tensor:
    """Return 1 / base^(2i / dim): float32 [dim / 2], radians per position."""
    return 1.0 / (base ** _exponents(dim))


def llama3_frequencies(spec: Any) -> Tensor:
    """Return Llama 3.1's frequencies [dim / 2]: low ones divided by the factor, high ones unchanged, others blended."""
    params, factor = spec.llama3_params, spec.scaling_factor
    frequencies = base_frequencies(spec.dim, spec.base)
    original = params.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = params.low_freq_factor, params.high_freq_factor
    long_wave, short_wave = original / low, original / high
    slowed = torch.where(wavelengths > long_wave, frequencies / factor, frequencies)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (wavelengths >= short_wave) & (wavelengths <= long_wave)
    return torch.where(between, blended, slowed)


def yarn_frequencies(spec: Any) -> Tensor:
    """Return YaRN's frequencies [dim / 2]: unchanged below a range of dimensions, interpolated above, blended inside.

    Source: YaRN (Peng et al., 2023, arXiv:2309.00071), section 3.2. LMDeploy stores the original length as
    ``spec.max_position_embeddings``.
    """
    params, dim, length = spec.yarn_params, spec.dim, spec.max_position_embeddings

    def dimension_of(rotations: float) -> float:
        """Return the dimension whose angle makes this many full rotations within the original length."""
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(spec.base))

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
    """Tables of cos and sin for frequencies that never change.

    inv_freq: float32 [dim / 2], radians per position. scale: factor of cos and sin. LMDeploy's mrope wrapper reads the
    attributes of this class, so their names are fixed.
    """

    inv_freq: Tensor
    scaling_factor = 1.0

    def __init__(self, inv_freq: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_scaling = scale

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [B, N, dim], of x's dtype and device. position_ids: [B, N]."""
        angles = position_ids.unsqueeze(-1).float() * self.inv_freq.to(x.device)
        return _tables(angles, self.attention_scaling, x.dtype)


class TablesByLength(nn.Module):
    """Tables of cos and sin for frequencies that depend on each token's governing length."""

    def frequencies(self, lengths: Tensor) -> Tensor:
        """Return the frequencies of N tokens, float32 [N, dim / 2]. lengths: governing lengths, int64 [N]."""
        raise NotImplementedError

    def scale(self, lengths: Tensor) -> float | Tensor:
        """Return the factor of cos and sin: one number, or [N, 1]. lengths: governing lengths, int64 [N]."""
        return 1.0

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [1, N, dim]. position_ids: positions and governing lengths, int64 [2, N]."""
        is_governed = position_ids.shape[0] == 2
        torch._check(is_governed, lambda: "this rope type needs positions and governing lengths, [2, N]")
        positions, lengths = position_ids[0], position_ids[1]
        angles = positions.unsqueeze(-1).float() * self.frequencies(lengths)
        return _tables(angles.unsqueeze(0), self.scale(lengths), x.dtype)


class DynamicTables(TablesByLength):
    """Dynamic NTK scaling: beyond the trained length the base grows with a token's governing length.

    LMDeploy's mrope wrapper looks for the method ``_ntk_inv_freq``: an object with it has frequencies that change.
    """

    inv_freq: Tensor
    exponents: Tensor

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.dim, self.base, self.factor = spec.dim, spec.base, spec.scaling_factor
        self.trained_length = spec.max_position_embeddings
        self.register_buffer("inv_freq", base_frequencies(spec.dim, spec.base), persistent=False)
        self.register_buffer("exponents", _exponents(spec.dim), persistent=False)

    def _ntk_inv_freq(self, lengths: Tensor) -> Tensor:
        growth = (self.factor * lengths / self.trained_length) - (self.factor - 1)
        base = self.base * growth ** (self.dim / (self.dim - 2))
        scaled = 1.0 / (base.unsqueeze(-1) ** self.exponents.to(lengths.device))
        is_long = lengths.unsqueeze(-1) > self.trained_length
        return torch.where(is_long, scaled, self.inv_freq.to(lengths.device))

    frequencies = _ntk_inv_freq


class LongRopeTables(TablesByLength):
    """LongRoPE (arXiv:2402.13753): short factors up to the original length, long factors beyond it.

    short_factor, long_factor: float32 [dim / 2], the frequencies after division by the short and by the long factors.
    scales: the factors of cos and sin, as a pair (short, long).
    """

    short_factor: Tensor
    long_factor: Tensor

    def __init__(self, spec: Any) -> None:
        super().__init__()
        params = spec.longrope_params
        self.original_length = params.original_max_position_embeddings
        self.scales = (params.short_mscale, params.long_mscale)
        if None in self.scales:
            factor = spec.max_position_embeddings / self.original_length
            self.scales = (longrope_scale(factor, self.original_length),) * 2
        periods = spec.base ** _exponents(spec.dim)
        for name in ("short_factor", "long_factor"):
            inv_freq = 1.0 / (torch.tensor(getattr(params, name), dtype=torch.float32) * periods)
            self.register_buffer(name, inv_freq, persistent=False)

    def _choose(self, lengths: Tensor, short: Any, long: Any) -> Tensor:
        return torch.where((lengths > self.original_length).unsqueeze(-1), long, short)

    def frequencies(self, lengths: Tensor) -> Tensor:
        return self._choose(
            lengths, self.short_factor.to(lengths.device), self.long_factor.to(lengths.device)
        )

    def scale(self, lengths: Tensor) -> float | Tensor:
        short, long = self.scales
        return short if short == long else self._choose(lengths, short, long)


def _tables(angles: Tensor, scale: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _linear(spec: Any) -> RotaryTables:
    return RotaryTables(base_frequencies(spec.dim, spec.base) / spec.scaling_factor)


_BUILDERS = {
    RopeType.Default: _linear,
    RopeType.LinearScaling: _linear,
    RopeType.DynamicNTKScaling: DynamicTables,
    RopeType.Llama3: lambda spec: RotaryTables(llama3_frequencies(spec)),
    RopeType.Yarn: lambda spec: RotaryTables(yarn_frequencies(spec), yarn_scale(spec)),
    RopeType.LongRoPEScaling: LongRopeTables,
}


def from_spec(spec: Any) -> nn.Module:
    """Build the tables of a RotaryEmbeddingBuildSpec. Raises UnsupportedFeatureError for unknown rope types."""
    if spec.emb_type not in _BUILDERS:
        raise refuse(f"rope type {spec.emb_type.name}", "use another model")
    return _BUILDERS[spec.emb_type](spec)


class ApplyRotary(DlinferApplyRotaryEmbImpl):
    """Rotates heads. If the tables are narrower than a head, the head's further features are returned unchanged."""

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
        """Return rotated query [N, Hq, D] and key [N, Hkv, D]. cos, sin: [N, d] with d <= D."""
        rotated = cos.shape[-1]
        if complex_mode:
            return super().forward(query, key, cos, sin, inplace, complex_mode, return_native_layout)
        if rotated == query.shape[-1]:
            return super().forward(query, key, cos, sin, inplace)
        q, k = super().forward(query[..., :rotated], key[..., :rotated], cos, sin)
        kept = (query[..., rotated:], key[..., rotated:])
        return torch.cat((q, kept[0]), dim=-1), torch.cat((k, kept[1]), dim=-1)
