"""Attention and the paged KV cache."""
