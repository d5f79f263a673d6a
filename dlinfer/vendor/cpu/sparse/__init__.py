"""Sparse attention on CPU."""
