"""Mixture of experts with the vendor's routing and grouped products.

LMDeploy imports the names of ``storage`` from here while it builds a model's experts.
"""

from dlinfer.vendor.ascend.moe.storage import (
    ChunkedLayout,
    build_chunked_moe_storage_layout,
    chunked_moe_storage_expert_id,
    zero_chunked_moe_weight_padding,
)

__all__ = [
    "ChunkedLayout",
    "build_chunked_moe_storage_layout",
    "chunked_moe_storage_expert_id",
    "zero_chunked_moe_weight_padding",
]
