"""Layers with 4-bit weights: products that read packed words, and mixtures of experts that use them."""
