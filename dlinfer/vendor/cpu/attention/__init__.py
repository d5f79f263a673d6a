"""Attention on CPU and its cache: kernels of the ops ``*_attention`` and ``fill_*kv_cache``, for ``kernels.py``."""
