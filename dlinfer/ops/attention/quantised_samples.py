"""Samples of attention ops with quantised caches."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_quantisation import (
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    is_scaled_by_token,
    quantise,
)
from dlinfer.ops.attention.samples import Case
from dlinfer.ops.core.samples import Sample, SampleMaker

FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8_E4M3, "fp8 e5m2": FP8_E5M2}

# The samples of the ops without quantisation cover the other cases.
_CASES = ("block boundaries", "values smaller than keys", "a padding row", "all extras", "output in q")


def quantised_attention_samples(
    make: SampleMaker, table: Sequence[Case], arguments: Callable[[SampleMaker, Case], tuple[Any, ...]]
) -> Iterator[Sample]:
    """Yield samples: the first case of ``table`` in each quantised format, and the cases named in ``_CASES`` in int8.

    arguments: returns the arguments of a case for the op without quantisation. This function quantises the two caches
        among them. Unwritten slots dequantise to NaN.
    """
    named = [(f"{name}, {table[0].name}", table[0], quant_bits) for name, quant_bits in FORMATS.items()]
    named += [(f"int8, {case.name}", case, INT8) for case in table if case.name in _CASES]
    for name, case, quant_bits in named:
        q, k_cache, v_cache, *rest = arguments(make, case)
        keys, k_scales = _quantised(make, k_cache, quant_bits)
        values, v_scales = _quantised(make, v_cache, quant_bits)
        args = (q, keys, values, *rest, k_scales, v_scales, quant_bits)
        yield Sample(name, args, aliased=case.aliased)


def quantised_cache(
    make: SampleMaker, blocks: int, block_size: int, kv_heads: int, head_size: int, quant_bits: int
) -> tuple[Tensor, Tensor]:
    """Return two tensors, a filled cache and its scales and zeros, both in the vendor's layout."""
    return _quantised(make, make.cache(blocks, block_size, kv_heads, head_size), quant_bits)


def _quantised(make: SampleMaker, cache: Tensor, quant_bits: int) -> tuple[Tensor, Tensor]:
    scale = torch.tensor(0.75, device=make.device)
    if not is_scaled_by_token(quant_bits):
        return quantise(cache, quant_bits, scale)[0], scale
    codes, scales_zeros = quantise(make.layout.canonical(cache), quant_bits, cache)
    assert scales_zeros is not None, "int8 and int4 have some"
    return _laid_out(make, codes), _laid_out(make, scales_zeros)


def _laid_out(make: SampleMaker, values: Tensor) -> Tensor:
    return values.permute(*("BSHD".index(dim) for dim in make.layout.order)).contiguous()
