"""Attention, rotary embeddings and the paged KV cache."""
