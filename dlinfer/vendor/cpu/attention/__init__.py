"""Kernels for attention on CPU and for its KV cache: the ops ``*_attention`` and ``fill_*kv_cache``."""
