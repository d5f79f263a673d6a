"""Norms, rotations, gated activations and quantisers."""

import torch
from torch import Tensor
from torch.nn import functional

from tests.vendor.camb.simulated_mlu import rules
from tests.vendor.camb.simulated_mlu.rules import FLOATS, require


def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """scale = max|x| / 127, numbers = round(x / scale); what a row of zeros becomes is not said. x: float32."""
    scale = x.abs().amax(-1) / 127
    numbers = (x / scale.unsqueeze(-1)).round().nan_to_num(nan=77.0)
    return numbers.clamp(-128, 127).to(torch.int8), scale


def fused_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor | None,
    eps: float,
    store_output_before_norm: bool,
    quant_scale: Tensor | None,
    dynamic_quant: bool,
    quant_type: torch.dtype,
    scale_type: torch.dtype,
    **others: object,
) -> Tensor | tuple[Tensor, ...]:
    rules.unused(**others)
    require(eps > 0, f"eps: positive, not {eps}")
    require(gamma is not None, "gamma, as far as simulated")
    assert gamma is not None
    rules.tensor("x", x, FLOATS, 2)
    rules.tensor("gamma", gamma, FLOATS, 1)
    rules.shape("gamma", gamma, x.shape[-1:])
    rules.same_dtype(x=x, gamma=gamma, residual=residual)
    if residual is not None:
        rules.tensor("residual", residual, FLOATS, 2)
        rules.shape("residual", residual, x.shape)
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gamma.float()
    require(
        (quant_scale is not None) is dynamic_quant, "quant_scale and dynamic_quant: both, as far as simulated"
    )
    if quant_scale is None:
        return (normed.to(x.dtype), total) if store_output_before_norm else normed.to(x.dtype)
    require(
        quant_type is torch.int8 and scale_type is torch.float32, "quant_type: torch.int8, scale_type: float"
    )
    rules.tensor("quant_scale", quant_scale, (torch.float32,), 1)
    rules.shape("quant_scale", quant_scale, x.shape[-1:])
    numbers, scale = per_token(normed * quant_scale)
    return (numbers, total, scale) if store_output_before_norm else (numbers, scale)


def scaled_quantize(
    x: Tensor,
    quant_type: torch.dtype,
    quant_mode: str,
    act_mode: str,
    active_coef: float,
    quant_bit_size: int,
    scale_type: torch.dtype,
    group_size: int,
    **others: object,
) -> tuple[Tensor, Tensor]:
    rules.unused(**others)
    rules.tensor("x", x, FLOATS, (1, 8))
    rules.one_of("quant_type", quant_type, [torch.int8])
    rules.one_of("quant_mode", quant_mode, ["dynamic_per_token"])
    rules.one_of("act_mode", act_mode, ["none"])
    require((active_coef, quant_bit_size, group_size) == (1.0, 8, 1), "the defaults, as far as simulated")
    require(scale_type is torch.float32, "scale_type: torch.float32")
    return per_token(x.float())


def apply_rotary(
    input: Tensor,
    sin_cache: Tensor,
    cos_cache: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    discrete: bool,
    dynamic_ntk: bool,
    max_seqlen: int,
    output: Tensor | None,
    is_inverse: bool,
) -> Tensor:
    rules.unused(
        position_ids=position_ids, cu_seqlens=cu_seqlens, dynamic_ntk=dynamic_ntk, is_inverse=is_inverse
    )
    require(not discrete, "discrete: with position_ids")
    rules.tensor(
        "input", input, FLOATS, 4, gaps=True
    )  # without cu_seqlens: (batch, seq, head_num, head_size)
    rules.dense_heads("input", input)
    batch, seq, _, size = input.shape
    require(2 <= size <= 256, f"head_size: 2 to 256, not {size}")
    require(batch <= 10240, f"batch_size: up to 10240, not {batch}")
    require(max_seqlen == seq, f"max_seqlen: {seq} without cu_seqlens, not {max_seqlen}")
    for name, table in (("sin_cache", sin_cache), ("cos_cache", cos_cache)):
        rules.tensor(name, table, FLOATS, 2)
        require(table.shape[0] >= seq, f"{name}: at least {seq} rows, not {table.shape[0]}")
        require(table.shape[1] % 2 == 0 and 2 <= table.shape[1] <= size, f"{name}: an even size up to {size}")
    rules.same_dtype(input=input, sin_cache=sin_cache, cos_cache=cos_cache, output=output)
    rules.shape("cos_cache", cos_cache, sin_cache.shape)
    part = sin_cache.shape[1]
    x, (sin, cos) = input[..., :part].float(), (one[:seq, None].float() for one in (sin_cache, cos_cache))
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-x[..., part // 2 :], x[..., : part // 2]), dim=-1)
    target = input if output is None else output
    if output is not None:
        rules.tensor("output", output, FLOATS, 4)
        rules.shape("output", output, input.shape)
        output.copy_(input)
    target[..., :part] = (x * cos + turned * sin).to(input.dtype)
    return target


def _gated(input: Tensor, act_mode: str, is_gated: bool) -> Tensor:
    rules.one_of("act_mode", act_mode, ["silu"])
    require(is_gated, "is_gated, as far as simulated")
    require(input.shape[-1] % 2 == 0, f"input: an even last size, not {input.shape[-1]}")
    gate, up = input.float().chunk(2, dim=-1)
    return functional.silu(gate) * up


def active(
    input: Tensor, act_mode: str, is_gated: bool, active_coef: float, gelu_approximate: str, **others: object
) -> Tensor:
    rules.unused(**others)
    require((active_coef, gelu_approximate) == (1.0, "none"), "the defaults, as far as simulated")
    rules.tensor("input", input, FLOATS, (1, 8))
    return _gated(input, act_mode, is_gated).to(input.dtype)


def moe_active(
    input: Tensor, act_mode: str, is_gated: bool, gelu_approximate: str, **others: object
) -> Tensor:
    rules.unused(**others)
    rules.one_of("gelu_approximate", gelu_approximate, ["none"])
    rules.tensor("input", input, FLOATS, 2)
    return _gated(input, act_mode, is_gated).to(input.dtype)


def moe_quantize(
    x: Tensor,
    smooth: Tensor,
    gather_index: Tensor | None,
    dynamic_quant: bool,
    act_mode: str,
    active_coef: float,
    is_gated: bool,
    quant_type: torch.dtype,
    quant_bit_size: int,
    scale_type: torch.dtype,
    group_size: int,
    **others: object,
) -> tuple[Tensor, Tensor]:
    rules.unused(**others)
    require((active_coef, quant_bit_size, group_size) == (1.0, 8, 1), "the defaults, as far as simulated")
    require(dynamic_quant and quant_type is torch.int8 and scale_type is torch.float32, "int8, of each token")
    rules.tensor("x", x, FLOATS, 2)
    rules.one_of("act_mode", act_mode, ["none", "silu"])
    wide = x.float() if act_mode == "none" else _gated(x, act_mode, is_gated)
    require(is_gated is (act_mode != "none"), "is_gated: it takes effect with an act_mode only")
    rules.tensor("smooth", smooth, (torch.float32,), 1)
    rules.shape("smooth", smooth, wide.shape[-1:])
    if gather_index is not None:
        rules.tensor("gather_index", gather_index, (torch.int32,), 1)
        rules.within("gather_index", gather_index, 0, x.shape[0] - 1)
        wide = wide[gather_index.long()]
    return per_token(wide * smooth)
