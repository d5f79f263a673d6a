"""Write new tokens' keys and values into a quantised paged cache, scales and zeros included."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import canonical, check_slots
from dlinfer.ops.attention.kv_quantisation import (
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    check_apart,
    check_format,
    check_quantised_cache,
    quantise,
)
from dlinfer.ops.attention.quantised_samples import quantised_cache
from dlinfer.ops.core.checks import Rules, ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op


@fused_op(
    mutates=("k_cache", "v_cache", "k_scales_zeros", "v_scales_zeros"),
    tolerances=Tolerance(0.0, 0.0, "codes, scales and zeros are defined to the last bit"),
    makes_codes=True,
)
def fill_quantised_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_start_indices: Tensor,
    k_scales_zeros: Tensor,
    v_scales_zeros: Tensor,
    quant_bits: int,
) -> None:
    """The torch op that ``dlinfer.ops.fill_kv_cache`` calls for quantised caches (``kv_quantisation``).

    k: [tokens, kv_heads, head_size], v: [tokens, kv_heads, head_size_v], any strides.
    k_cache, v_cache: [blocks, block_size, kv_heads, stored size], in the vendor's layout and the format's dtype; both
        are mutated.
    kv_start_indices: [tokens], int32 or int64, as in ``fill_kv_cache``.
    k_scales_zeros, v_scales_zeros: [blocks, block_size, kv_heads, 2] for int8 and int4, mutated. For fp8 one scale
        each, float32 of one element. The schema declares fp8 scales as mutated too, but the op does not write them.
    quant_bits: 8, 4, 16 or 17.

    Returns nothing. Raises OpArgumentError before anything is written, also for a slot past the end of the cache.
    """
    keys, values = canonical(k_cache), canonical(v_cache)
    check_slots(kv_start_indices, keys)
    check_apart(fill_quantised_kv_cache.rules, k_cache, v_cache, quant_bits)
    for new, cache, scales_zeros in ((k, keys, k_scales_zeros), (v, values, v_scales_zeros)):
        codes, fresh = quantise(new, quant_bits, scales_zeros)
        for token, slot in enumerate(ints(kv_start_indices)):
            if slot >= 0:
                block, offset = divmod(slot, cache.shape[1])
                cache[block, offset] = codes[token]
                if fresh is not None:
                    canonical(scales_zeros)[block, offset] = fresh[token]


fill_quantised_kv_cache.takes(
    k="float [tokens, kv_heads, head_size]",
    v="like k [tokens, kv_heads, head_size_v]",
    kv_start_indices="int on k [tokens]",
)


@fill_quantised_kv_cache.check
def _check_fill_quantised_kv_cache(
    rules: Rules,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales_zeros: Tensor,
    v_scales_zeros: Tensor,
    quant_bits: int,
) -> None:
    check_format(rules, quant_bits)
    check_quantised_cache(rules, "k", k_cache, k_scales_zeros, quant_bits, "k", k)
    check_quantised_cache(rules, "v", v_cache, v_scales_zeros, quant_bits, "v", v)
    keys, values = canonical(k_cache), canonical(v_cache)
    rules.size("k_cache", keys, 2, k.shape[1], "the kv heads of k")
    for dim, what in enumerate(("blocks", "block size", "kv heads")):
        rules.size("v_cache", values, dim, keys.shape[dim], f"the {what} of k_cache")


@fill_quantised_kv_cache.samples
def _fill_quantised_kv_cache_samples(make: SampleMaker) -> Iterator[Sample]:
    slots = make.permutation(32)

    def sample(
        name: str, bits: int, k: Tensor, v: Tensor, blocks: int, block_size: int, where: Tensor
    ) -> Sample:
        caches, scales = list[Tensor](), list[Tensor]()
        for new in (k, v):
            cache, scales_zeros = quantised_cache(make, blocks, block_size, new.shape[1], new.shape[2], bits)
            caches.append(cache)
            scales.append(scales_zeros)
        return Sample(name, (k, v, *caches, where, *scales, bits))

    for name, bits in (("int8", INT8), ("int4", INT4), ("fp8", FP8_E4M3), ("fp8 e5m2", FP8_E5M2)):
        states = make.tensor(9, 2, 16, scale=3.0), make.tensor(9, 2, 16)
        yield sample(f"{name}, scattered", bits, *states, 4, 8, slots[:9])
    yield sample(
        "int4, other value size, int32",
        INT4,
        make.tensor(5, 2, 24),
        make.tensor(5, 2, 8),
        8,
        4,
        slots[:5].to(torch.int32),
    )
    yield sample("no tokens", INT8, make.tensor(0, 2, 16), make.tensor(0, 2, 16), 2, 16, slots[:0])
    padded = slots[:6].clone()
    padded[1::2] = -1
    yield sample("int8, padding", INT8, make.tensor(6, 2, 16), make.tensor(6, 2, 16), 4, 8, padded)
    qkv = make.tensor(7, 8, 16)
    yield sample("int8, views of a packed qkv", INT8, qkv[:, 4:6], qkv[:, 6:], 4, 8, slots[:7])
    flat = make.tensor(4, 2, 16)
    flat[0], flat[1], flat[2] = 0.0, -3.0, 5.0
    yield sample("int8, vectors of equal elements", INT8, flat, -flat, 4, 8, slots[:4])
