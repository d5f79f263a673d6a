"""Adaptors that make serving frameworks and model libraries use the fused ops."""
