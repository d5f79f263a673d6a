"""Layers with weights in GGUF's blocks: products that unpack them on their way from memory (csrc/gguf)."""
