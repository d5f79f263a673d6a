"""Write new tokens' keys and values into the paged KV cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlinfer.ops.attention.kv_cache import canonical, check_slots, guard_layout, packed
from dlinfer.ops.attention.kv_quantisation import Scales, scales_of
from dlinfer.ops.attention.quantised_fill import fill_quantised_kv_cache
from dlinfer.ops.core.checks import ints
from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import Tolerance, fused_op


@fused_op(mutates=("k_cache", "v_cache"), tolerances=Tolerance(0.0, 0.0, "values are copied"))
def fill_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_start_indices: Tensor) -> None:
    """The torch op behind ``dlinfer.ops.fill_kv_cache``, which documents the arguments. Returns nothing."""
    keys, values = canonical(k_cache), canonical(v_cache)
    block_size = keys.shape[1]
    check_slots(kv_start_indices, keys)
    for token, slot in enumerate(ints(kv_start_indices)):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            keys[block, offset] = k[token]
            values[block, offset] = v[token]


@fill_kv_cache.python_call
def _call_fill_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_start_indices: Tensor,
    k_scales_zeros: Scales = (),
    v_scales_zeros: Scales = (),
    quant_bits: int | None = 0,
) -> tuple[Tensor, Tensor]:
    """Write new tokens' keys and values into their slots of the paged cache.

    k: [tokens, kv_heads, head_size], v: [tokens, kv_heads, head_size_v], any strides; both may have a leading
        dimension of 1.
    k_cache: [blocks, block_size, kv_heads, head_size], v_cache: [blocks, block_size, kv_heads, head_size_v]. Both are
        in the vendor's layout, have k's dtype, and are mutated. v_cache may be a view of k_cache if v is the same view
        of k. Quantised caches have the dtype and the last size of their format, see
        ``dlinfer.ops.attention.kv_quantisation``.
    kv_start_indices: [tokens], int32 or int64: each token's slot, block * block_size + offset. Slots do not repeat. A
        negative slot marks a padding token, which is not written (vLLM's convention; LMDeploy passes none).
    k_scales_zeros, v_scales_zeros: empty or None if the caches are not quantised. For int8 and int4: [blocks,
        block_size, kv_heads, 2], in the vendor's layout: scales and zeros, both mutated. For fp8: the scale, float32
        of one element, not mutated.
    quant_bits: LMDeploy's quant_policy: 8, 4, 16 (float8_e4m3fn) or 17 (float8_e5m2); 0 or None for no quantisation.

    Returns (k_cache, v_cache). Raises OpArgumentError, also for a slot past the end of the cache. Raises
    UnsupportedFeatureError for a cache in another quantised format.
    """
    guard_layout(k_cache)
    scales = scales_of("fill_kv_cache", quant_bits, k_scales_zeros, v_scales_zeros)
    if scales is None:
        fill_kv_cache.overload(packed(k), packed(v), k_cache, v_cache, kv_start_indices)
    else:
        fill_quantised_kv_cache.overload(
            packed(k), packed(v), k_cache, v_cache, kv_start_indices, *scales, int(quant_bits or 0)
        )
    return k_cache, v_cache


fill_kv_cache.takes(
    k="float [tokens, kv_heads, head_size]",
    v="like k [tokens, kv_heads, head_size_v]",
    k_cache="cache like k [blocks, block_size, kv_heads, head_size]",
    v_cache="cache like k [blocks, block_size, kv_heads, head_size_v]",
    kv_start_indices="int on k [tokens]",
)


@fill_kv_cache.samples
def _fill_kv_cache_samples(make: SampleMaker) -> Iterator[Sample]:
    def caches(blocks: int, block_size: int, heads: int, size: int, size_v: int) -> tuple[Tensor, Tensor]:
        return make.cache(blocks, block_size, heads, size), make.cache(blocks, block_size, heads, size_v)

    slots = make.permutation(32)
    yield Sample(
        "scattered", (make.tensor(9, 2, 16), make.tensor(9, 2, 16), *caches(4, 8, 2, 16, 16), slots[:9])
    )
    yield Sample(
        "other value size, int32",
        (make.tensor(5, 2, 24), make.tensor(5, 2, 8), *caches(8, 4, 2, 24, 8), slots[:5].to(torch.int32)),
    )
    yield Sample(
        "one token, one head",
        (make.tensor(1, 1, 64), make.tensor(1, 1, 64), *caches(2, 16, 1, 64, 64), slots[:1]),
    )
    yield Sample(
        "no tokens", (make.tensor(0, 2, 16), make.tensor(0, 2, 16), *caches(2, 16, 2, 16, 16), slots[:0])
    )
    padded = slots[:6].clone()
    padded[1::2] = -1
    yield Sample("padding", (make.tensor(6, 2, 16), make.tensor(6, 2, 16), *caches(4, 8, 2, 16, 16), padded))
    qkv = make.tensor(7, 8, 16)
    yield Sample("views of a packed qkv", (qkv[:, 4:6], qkv[:, 6:], *caches(4, 8, 2, 16, 16), slots[:7]))
    latent, cache = make.tensor(5, 1, 24), make.cache(4, 8, 1, 24)
    part = cache.narrow(make.layout.order.index("D"), 0, 16)
    shared = (latent, latent[..., :16], cache, part, slots[:5])
    yield Sample("values are a part of the keys", shared, aliased=True)
