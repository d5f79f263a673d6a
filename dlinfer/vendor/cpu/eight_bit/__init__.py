"""Kernels of 8-bit weights and activations on CPU. Weights stay as they are; no float copy of a whole one is made.

rows: quantise activations to 8 bits. products: multiply 8-bit numbers. linears, experts: the ops.
"""
