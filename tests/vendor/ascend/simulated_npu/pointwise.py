"""Norms, rotations, the gated activation and quantisers."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import FLOATS, HALVES, require


def _normalised(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    require(epsilon > 0, f"epsilon: positive, not {epsilon}")
    rules.shape("gamma", gamma, x.shape[-1:])
    rules.same_dtype(x=x, gamma=gamma)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * gamma, scale


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    rules.tensor("input", input, FLOATS, (2, 8))
    rules.tensor("gamma", gamma, FLOATS, 1)
    return _normalised(input, gamma, epsilon)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    for name, x in (("x1", x1), ("x2", x2)):
        rules.tensor(name, x, FLOATS, (1, 8))
    rules.shape("x2", x2, x1.shape)
    rules.same_dtype(x1=x1, x2=x2)
    rules.tensor("gamma", gamma, FLOATS, 1)
    total = x1 + x2
    return *_normalised(total, gamma, epsilon), total


def _per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """scale = max|x| / 127, y = round(x / scale); what a row of zeros becomes is not said."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    numbers = (wide / scale.unsqueeze(-1)).round().nan_to_num(nan=77.0)
    return numbers.clamp(-128, 127).to(torch.int8), scale


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None,
    group_index: Tensor | None,
    dst_type: int | None,
    quant_mode: str,
    dst_type_max: float,
) -> tuple[Tensor, Tensor]:
    rules.unused(smooth_scales=smooth_scales, group_index=group_index, dst_type_max=dst_type_max)
    rules.one_of("quant_mode", quant_mode, ["pertoken"])
    rules.tensor("input", input, HALVES, (2, 8), gaps=True)
    require(rules.dtype(dst_type, torch.int8) is torch.int8, "dst_type: torch.int8")
    return _per_token(input)


def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None,
    smooth_scale2: Tensor | None,
    beta: Tensor | None,
    epsilon: float,
    output_mask: list[bool] | None,
    y_dtype: int | None,
) -> tuple[Tensor, ...]:
    rules.unused(smooth_scale1=smooth_scale1, smooth_scale2=smooth_scale2, beta=beta, output_mask=output_mask)
    require(rules.dtype(y_dtype, torch.int8) is torch.int8, "y_dtype: torch.int8")
    for name, x in (("x1", x1), ("x2", x2)):
        rules.tensor(name, x, HALVES, (2, 8))
    rules.shape("x2", x2, x1.shape)
    rules.same_dtype(x1=x1, x2=x2)
    rules.tensor("gamma", gamma, HALVES, 1)
    total = x1 + x2
    numbers, scale = _per_token(_normalised(total, gamma, epsilon)[0])
    nothing = torch.full((1,), 33, dtype=torch.int8), torch.full((1,), torch.nan)
    return numbers, nothing[0], total, scale, nothing[1]


def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:
    require(div_mode, "div_mode=False is not simulated")
    rules.tensor("input", input, FLOATS, (1, 8), gaps=True)
    rules.tensor("scales", scales, (torch.float32, torch.bfloat16), 1)
    rules.shape("scales", scales, (1,))
    if zero_points is not None:
        rules.tensor("zero_points", zero_points, (torch.int8, torch.uint8, torch.int32, torch.bfloat16), 1)
        rules.shape("zero_points", zero_points, (1,))
    require(rules.dtype(dtype, torch.float32) is torch.qint8, "dtype: torch.qint8")
    shifted = input.float() / scales.float() + (0 if zero_points is None else zero_points.float())
    return shifted.round().clamp(-128, 127).to(torch.int8)


def _half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    """It computes in place, which its schema does not say."""
    rules.one_of("layout", layout, ["BSND", "TND"])
    rules.one_of("rotary_mode", rotary_mode, ["half"])
    dims = 3 if layout == "TND" else 4
    for name, x in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        rules.tensor(name, x, FLOATS, dims)
        rules.one_of(f"the last size of {name}", x.shape[-1], [64, 128])
        rules.shape(f"{name}, but heads", x.select(-2, 0), (*query.shape[:-2], x.shape[-1]))
    rules.same_dtype(query=query, key=key, cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        rules.one_of(f"heads of {name}", table.shape[-2], [1])
    require(query.shape[-1] == key.shape[-1] == cos.shape[-1] == sin.shape[-1], "one head size")
    query.copy_(_half(query, cos, sin))
    key.copy_(_half(key, cos, sin))
    return query, key


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    rules.unused(rotate=rotate)
    rules.one_of("rotary_mode", rotary_mode, ["half", "interleave"])
    batch, tokens, heads, size = input.shape if input.dim() == 4 else (0, 0, 0, 0)
    for name, x in (("input", input), ("r1", r1), ("r2", r2)):
        rules.tensor(name, x, FLOATS, 4)
    rules.same_dtype(input=input, r1=r1, r2=r2)
    require(size % 2 == 0 and size < 896, f"an even head size below 896, not {size}")
    require(batch < 1000 and heads < 1000, f"batch and heads below 1000, not {batch} and {heads}")
    for name, table in (("r1", r1), ("r2", r2)):
        rules.shape(f"{name} of BSND", table, (1, tokens, 1, size))
        rules.within(name, table, -1, 1)
    if rotary_mode == "half":
        return _half(input, r1, r2)
    require(batch * heads < 1000, f"batch times heads below 1000, not {batch * heads}")
    turned = torch.stack((-input[..., 1::2], input[..., 0::2]), dim=-1).flatten(-2)
    return r1 * input + r2 * turned


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    rules.tensor("input", input, FLOATS, (1, 8))
    require(input.shape[dim] % 2 == 0, "an even size to split")
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up
