"""Kernels of 8-bit weights and activations on CPU. They make no float copy of a whole weight.

rows: quantise activations to 8 bits. products: multiply 8-bit numbers. linears, experts: the ops that use both.
"""
