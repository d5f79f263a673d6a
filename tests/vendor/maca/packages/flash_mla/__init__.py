"""A stand-in of MetaX's flash_mla 1.0.1 for tests: its Python functions over the simulated flash_mla_cuda."""

from tests.vendor.maca.simulated_card import calling, latent

_get_mla_metadata = calling.simulated("get_mla_metadata", latent.get_mla_metadata)
_fwd_kvcache_mla = calling.simulated("fwd_kvcache_mla", latent.fwd_kvcache_mla)


def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    return _get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits,
    softmax_scale=None,
    causal=False,
):
    return _fwd_kvcache_mla(
        q,
        k_cache,
        None,
        head_dim_v,
        cache_seqlens,
        block_table,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        tile_scheduler_metadata,
        num_splits,
    )
