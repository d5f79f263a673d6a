"""The paged KV cache of a generator: its sizes, and the pool of device and host blocks."""

from dlinfer.framework.mindie_ext.cache.pool import CachePool
from dlinfer.framework.mindie_ext.cache.settings import KVCacheSettings

__all__ = ["CachePool", "KVCacheSettings"]
