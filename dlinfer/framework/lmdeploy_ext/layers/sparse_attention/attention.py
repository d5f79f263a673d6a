"""Latent attention to the positions that an indexer chose."""

from typing import Any

from lmdeploy.pytorch.backends.attention import AttentionImpl
from lmdeploy.pytorch.backends.dlinfer.attention import DlinferAttentionMetadata
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse


class SparseAttention(AttentionImpl[DlinferAttentionMetadata]):
    """Fills the cache of latents and attends to chosen ones, of the same op in prefill and decoding."""

    def __init__(self, **fields: Any) -> None:
        """fields: of LMDeploy's AttentionImpl. Raises UnsupportedFeatureError for what the op lacks."""
        super().__init__(**fields)
        lacking = {
            "sliding_window": self.sliding_window,
            "logit_softcapping": self.logit_softcapping,
            "alibi": self.alibi,
            "more than one head of keys": self.num_kv_heads != 1,
        }
        for feature, is_asked in lacking.items():
            if is_asked:
                raise refuse(f"sparse attention with {feature}", "use another model")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        attn_metadata: DlinferAttentionMetadata,
        k_scales_zeros: Tensor | None = None,
        v_scales_zeros: Tensor | None = None,
        learnable_sink: Tensor | None = None,
        nsa_indices: Tensor | None = None,
        inplace: bool = True,
    ) -> Tensor:
        """query [N, Hq, C + R], key [N, 1, C + R], value [N, 1, C] -> a new [N, Hq, C], C the size of a latent.

        nsa_indices: int32 [N, count], positions in each token's sequence, negative ones are none. k_cache: in the
        vendor's layout, C + R numbers a token, of which v_cache is a view of the first C; key is written into it.
        """
        if learnable_sink is not None:
            raise refuse("sparse attention with sinks", "use another model")
        meta, size = attn_metadata, self.v_head_size
        assert nsa_indices is not None, "every layer of such a model has the choice of an indexer"
        assert meta.cu_seqlens_q_cpu is not None
        ops.fill_kv_cache(key, value, k_cache, v_cache, meta.kv_start_indices)
        return ops.sparse_flash_attention(
            query[..., :size],
            v_cache,
            v_cache,
            nsa_indices[:, None],
            self.scale,
            meta.block_offsets,
            meta.cu_seqlens_q_cpu[1:],
            meta.kv_seqlens_cpu,
            query[..., size:],
            k_cache[..., size:],
        )
