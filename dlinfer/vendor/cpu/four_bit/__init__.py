"""Layers whose weights are of 4 bits: products on packed words, and experts upon them."""
