"""Products of 8 and 4 bits: mcoplib's op/vllm/quantization."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import HALVES, require
from tests.vendor.maca.simulated_card.rows import aligned

_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where awq_to_gptq_4bit finds and leaves the eight neighbours of a word."""


def cutlass_scaled_mm(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None
) -> None:
    """cutlass_w8a8/scaled_mm_c2x.cu, which checks nothing: b in columns, a scale for each row and column.

    Multiples of 16 are vLLM-metax's (_cutlass_ops.py); other out dtypes are read as float16.
    """
    rules.tensor("a", a, (torch.int8,), 2)
    rules.tensor("b", b, (torch.int8,), 2, gaps=True)
    rules.tensor("out", out, HALVES, 2)
    (m, k), n = a.shape, b.shape[1]
    rules.shape("b", b, (k, n))
    rules.shape("out", out, (m, n))
    require(b.t().is_contiguous(), f"b: in columns, not of strides {b.stride()}")
    require(k % 16 == 0 and n % 16 == 0, f"sizes that are multiples of 16, not {k} and {n}")
    for name, scales, count in (("a_scales", a_scales, m), ("b_scales", b_scales, n)):
        rules.tensor(name, scales, (torch.float32,), (1, 2))
        require(scales.numel() == count, f"{name}: {count}, not {scales.numel()}")
    wide = (a.double() @ b.double()).float() * a_scales.view(-1, 1) * b_scales.view(1, -1)
    if bias is not None:
        rules.tensor("bias", bias, (out.dtype,), (1, 2))
        require(bias.numel() == n, f"bias: {n}")
        wide = wide + bias.float()
    out.copy_(wide.to(out.dtype))


def _unpacked(words: Tensor) -> Tensor:
    """[..., 8]: the neighbours of each word."""
    return torch.stack([(words >> (4 * place)) & 0xF for place in _NIBBLES], -1)


def awq_to_gptq_4bit(qweight: Tensor) -> Tensor:
    """awq/gemm_kernels.cu: words of neighbours along the inner size. Memory is [k / 8, n], its shape [n, k / 8]."""
    rules.tensor("qweight", qweight, (torch.int32,), 2)
    k, n = qweight.shape[0], qweight.shape[1] * 8
    require(k % 8 == 0, f"qweight: a multiple of 8 rows, not {k}")
    numbers = _unpacked(qweight).reshape(k // 8, 8, n).long()
    places = 4 * torch.tensor(_NIBBLES).view(1, 8, 1)
    words = (numbers << places).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int().view(n, k // 8)


def awq_gemm(
    _in_feats: Tensor,
    _kernel: Tensor,
    _scaling_factors: Tensor,
    _zeros: Tensor,
    split_k_iters: int,
    _temp_space: Tensor,
    dtype_bf16: bool,
) -> Tensor:
    """awq/gemm_kernels.cu: what it has no kernel for gives a line on stdout and zeros."""
    x, words, scales, zeros = _in_feats, _kernel, _scaling_factors, _zeros
    rules.tensor("_in_feats", x, (torch.bfloat16 if dtype_bf16 else torch.float16,), 2)
    rules.tensor("_kernel", words, (torch.int32,), 2)
    rules.tensor("_scaling_factors", scales, (x.dtype,), 2)
    rules.tensor("_zeros", zeros, (torch.int32,), 2)
    for name, one in (("_in_feats", x), ("_kernel", words), ("_scaling_factors", scales), ("_zeros", zeros)):
        aligned(name, one)
    (m, k), n = x.shape, words.shape[0]
    rules.shape("_kernel", words, (n, k // 8))
    groups = scales.shape[0]
    rules.shape("_scaling_factors", scales, (groups, n))
    rules.shape("_zeros", zeros, (groups, n // 8))
    require(k % groups == 0, f"groups of one size: {groups} in {k}")
    group = k // groups
    rules.tensor("_temp_space", _temp_space, (torch.float32,), (1, 2), empty=True)
    if dtype_bf16:
        require(_temp_space.numel() >= m * n and not _temp_space.any(), f"_temp_space: {m * n} zeros")
    if n % 16 or k % 32 or (min(group, 128) not in (32, 64, 128)) or (group > 128 and group % 128):
        return x.new_zeros(m, n)
    along = _unpacked(words.reshape(k // 8, n)).transpose(1, 2).reshape(k, n)
    zero = _unpacked(zeros).reshape(groups, n)
    group_of = torch.arange(k) // group
    weight = (along - zero[group_of]).to(x.dtype) * scales[group_of]
    return (x.float() @ weight.float()).to(x.dtype)
