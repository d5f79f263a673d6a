"""Kernels of 8-bit weights and activations on CPU. Weights stay as they lie: no float copy of a whole one is made.

rows: activations become 8-bit numbers. products: what such numbers give, multiplied. linears, experts: the ops.
answers: what the kernels in C++ are asked before they are trusted.
"""
