"""Products with quantised weights."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import HALVES, require

_LONGEST = 65535
_SCALED = {  # dtype of the result, whether tokens have scales -> dtypes of scale, and of bias
    (torch.bfloat16, True): ((torch.float32, torch.bfloat16), (torch.int32, torch.bfloat16, torch.float32)),
    (torch.float16, True): ((torch.float32,), (torch.int32, torch.float16, torch.float32)),
    (torch.bfloat16, False): ((torch.float32, torch.bfloat16), (torch.int32, torch.bfloat16, torch.float32)),
    (torch.float16, False): ((torch.float32, torch.int64), (torch.int32,)),
}


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int | None,
    **others: object,
) -> Tensor:
    rules.unused(offset=offset, **others)
    rules.tensor("x1", x1, (torch.int8,), 2)
    rules.tensor("x2", x2, (torch.int8,), 2, gaps=True)
    require(x2.is_contiguous() or x2.t().is_contiguous(), "x2: contiguous or transposed")
    (tokens, inner), (rows, columns) = x1.shape, x2.shape
    require(inner == rows, f"x2: {inner} rows, not {rows}")
    require(max(inner, columns) <= _LONGEST, f"sizes up to {_LONGEST}")
    dtype = rules.dtype(output_dtype, torch.int8)
    rules.one_of("output_dtype, as far as simulated", dtype, HALVES)
    scales, biases = _SCALED[dtype, pertoken_scale is not None]
    rules.tensor("scale", scale, scales, 1)
    require(scale.dtype is not torch.int64, "int64 scales are not simulated")
    rules.one_of("the size of scale", scale.shape[0], [1, columns])
    out = (x1.double() @ x2.double()).to(torch.float64)
    if bias is not None:
        rules.tensor("bias", bias, biases, 1)
        rules.shape("bias", bias, (columns,))
        if bias.dtype is torch.int32:
            out = out + bias
    out = out.float() * scale.float()
    if pertoken_scale is not None:
        rules.tensor("pertoken_scale", pertoken_scale, (torch.float32,), 1)
        rules.shape("pertoken_scale", pertoken_scale, (tokens,))
        out = out * pertoken_scale[:, None]
    if bias is not None and bias.dtype is not torch.int32:
        out = out + bias.float()
    return out.to(dtype)


def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int) -> Tensor:
    """Words of 8 neighbours of a row, the first in the lowest bits."""
    require(inner_k_tiles == 0, "inner_k_tiles: 0")
    rules.tensor("weight", weight, (torch.int32,), 2)
    require(weight.shape[1] % 8 == 0, "weight: a last size of a multiple of 8")
    rules.within("weight", weight, -8, 7)
    parts = (weight.long() & 15).unflatten(1, (-1, 8)) << (4 * torch.arange(8))
    words = parts.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _numbers(words: Tensor) -> Tensor:
    numbers = ((words.long()[..., None] >> (4 * torch.arange(8))) & 15).flatten(-2)
    return torch.where(numbers > 7, numbers - 16, numbers)


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    bias: Tensor | None,
    antiquant_group_size: int,
    inner_precise: int,
    weight_dtype: int | None,
) -> Tensor:
    rules.unused(
        quant_scale=quant_scale,
        quant_offset=quant_offset,
        inner_precise=inner_precise,
        weight_dtype=weight_dtype,
    )
    rules.tensor("x", x, HALVES, 2)
    rules.tensor("weight, of 4 bits as far as simulated", weight, (torch.int32,), 2)
    inner, columns = x.shape[1], weight.shape[1] * 8
    rules.shape("weight", weight, (inner, columns // 8))
    require(max(inner, columns) <= _LONGEST, f"sizes up to {_LONGEST}")
    size = antiquant_group_size
    if size:
        require(
            32 <= size <= inner - 1 and size % 32 == 0,
            f"antiquant_group_size: 32..{inner - 1} in steps of 32, not {size}",
        )
    groups = -(-inner // size) if size else 1
    for name, part in (("antiquant_scale", antiquant_scale), ("antiquant_offset", antiquant_offset)):
        if part is not None:
            rules.tensor(name, part, (x.dtype,), 2)
            rules.shape(name, part, (groups, columns))
    group_of = torch.arange(inner) // (size or inner)
    shift = 0 if antiquant_offset is None else antiquant_offset.float()[group_of]
    wide = (_numbers(weight) + shift) * antiquant_scale.float()[group_of]
    out = x.float() @ wide
    if bias is not None:
        rules.tensor("bias", bias, (torch.float32 if x.dtype is torch.bfloat16 else torch.float16,), 1)
        rules.shape("bias", bias, (columns,))
        out = out + bias.float()
    return out.to(x.dtype)
