"""Build specs of LMDeploy's attention layers, neutral but for what a test asks for."""

from typing import Any

from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec

HEADS, KV_HEADS, SIZE = 4, 2, 16


def paged_spec(**changes: Any) -> PagedAttentionBuildSpec:
    """A plain causal layer of 4 query and 2 key heads of size 16, with some fields changed."""
    neutral: dict[str, Any] = {
        "num_heads": HEADS,
        "head_dim": SIZE,
        "scale": None,
        "num_kv_heads": KV_HEADS,
        "v_head_dim": SIZE,
        "alibi": False,
        "sliding_window": None,
        "logit_softcapping": 0.0,
        "causal": True,
        "use_flash_mla": False,
        "mla_index_topk": None,
        "learnable_sink": False,
        "block_sparse_size": 1,
    }
    return PagedAttentionBuildSpec(**{**neutral, **changes})
