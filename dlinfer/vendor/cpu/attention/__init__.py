"""Attention on CPU and its KV cache: kernels of the ops ``*_attention`` and ``fill_*kv_cache``."""
