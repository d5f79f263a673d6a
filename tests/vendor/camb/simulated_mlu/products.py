"""Products with weights, of floats and of 8-bit numbers, whole and in groups."""

import torch
from torch import Tensor

from tests.vendor.camb.simulated_mlu import rules
from tests.vendor.camb.simulated_mlu.rules import FLOATS, HALVES, require


def _bias(bias: Tensor | None, dtype: torch.dtype, columns: int) -> Tensor | float:
    if bias is None:
        return 0.0
    rules.tensor("bias", bias, (dtype,), 1)
    rules.shape("bias", bias, (columns,))
    return bias.double()


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    act_mode: str,
    alpha: float,
    fast_act: bool,
    approximate: bool,
    trans_b: bool,
    **others: object,
) -> Tensor:
    rules.unused(**others)
    require(
        fast_act and approximate and (act_mode, alpha) == ("none", 1.0), "the defaults, as far as simulated"
    )
    rules.tensor("a", a, FLOATS, 2)
    rules.tensor("b", b, FLOATS, 2)
    rules.same_dtype(a=a, b=b)
    weight = b if trans_b else b.t()
    require(weight.shape[1] == a.shape[1], f"b: (n, k) or, not transposed, (k, n) with k = {a.shape[1]}")
    product = a.double() @ weight.double().t()
    return (product + _bias(bias, a.dtype, weight.shape[0])).to(a.dtype)


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    output_dtype: torch.dtype,
    bias: Tensor | None,
    act_mode: str,
    quant_bit_size: int,
    alpha: float,
    beta: float,
    a_quant_bit_size: int,
    **others: object,
) -> Tensor:
    rules.unused(**others)
    require((act_mode, alpha, beta) == ("none", 1.0, 1.0), "the defaults, as far as simulated")
    rules.one_of("output_dtype", output_dtype, HALVES)
    require(quant_bit_size == 8 and a_quant_bit_size == 8, "the bits of a and b: 8 for int8")
    for name, x in (("a", a), ("b", b)):
        rules.tensor(name, x, (torch.int8,), 2)
    rules.shape("b", b, (b.shape[0], a.shape[1]))
    require(a_scale is not None, "a_scale, as far as simulated")
    assert a_scale is not None
    for name, scale, count in (("a_scale", a_scale, a.shape[0]), ("b_scale", b_scale, b.shape[0])):
        rules.tensor(name, scale, (torch.float32,), 1)
        rules.shape(name, scale, (count,))
    product = (a.double() @ b.double().t()).float() * a_scale[:, None] * b_scale
    return (product + _bias(bias, output_dtype, b.shape[0])).to(output_dtype)


def _groups(a: Tensor, b: Tensor, counts: Tensor, most: int) -> list[tuple[int, slice]]:
    rules.tensor("the list of groups", counts, (torch.int32,), 1)
    rules.shape("the list of groups", counts, b.shape[:1])
    rows = counts.tolist()
    require(
        sum(rows) == a.shape[0] and min(rows) >= 0,
        f"the list of groups: counts of {a.shape[0]} rows, not {rows}",
    )
    require(max(rows) <= most, f"the maximum of the list: {max(rows)} at least, not {most}")
    ends = counts.cumsum(0).tolist()
    return [
        (group, slice(end - count, end)) for group, (end, count) in enumerate(zip(ends, rows, strict=True))
    ]


def group_gemm(
    a: Tensor,
    b: Tensor,
    group_list: Tensor,
    max_in_group_list: int,
    trans_b: bool,
    **others: object,
) -> Tensor:
    rules.unused(**others)
    require(trans_b, "trans_b, as far as simulated")
    rules.tensor("a", a, FLOATS, 2)
    rules.tensor("b", b, FLOATS, 3)
    rules.same_dtype(a=a, b=b)
    require(b.shape[2] == a.shape[1], f"b: (experts, n, k) with k = {a.shape[1]}")
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype)
    for group, rows in _groups(a, b, group_list, max_in_group_list):
        out[rows] = (a[rows].double() @ b[group].double().t()).to(a.dtype)
    return out


def smooth_quant_group_gemm(
    a: Tensor,
    b: Tensor,
    m_list: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    max_m: int,
    a_quant_bit_size: int,
    is_symmetric_quant: bool,
    **others: object,
) -> Tensor:
    rules.unused(**others)
    require(a_quant_bit_size == 8 and is_symmetric_quant, "the defaults, as far as simulated")
    rules.one_of("dtype", dtype, HALVES)
    rules.tensor("a", a, (torch.int8,), 2)
    rules.tensor("b", b, (torch.int8,), 3)
    require(b.shape[2] == a.shape[1], f"b: (experts, n, k) with k = {a.shape[1]}")
    require(a_scale is not None, "a_scale, as far as simulated")
    assert a_scale is not None
    rules.tensor("a_scale", a_scale, (torch.float32,), 1)
    rules.shape("a_scale", a_scale, a.shape[:1])
    rules.tensor("b_scale", b_scale, (torch.float32,), 2)
    rules.shape("b_scale", b_scale, b.shape[:2])
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=dtype)
    for group, rows in _groups(a, b, m_list, max_m):
        product = (a[rows].double() @ b[group].double().t()).float()
        out[rows] = (product * a_scale[rows, None] * b_scale[group]).to(dtype)
    return out
