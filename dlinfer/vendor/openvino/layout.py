"""The layout of the paged KV cache that the attention of OpenVINO's CPU plugin reads and writes."""

from dlinfer.vendor.base import KVCacheLayout

LAYOUT = KVCacheLayout("BHSD", block_size=32)
