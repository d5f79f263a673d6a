"""bfloat16 matrices that are packed in 12 bits a number, without loss.

matrices: the ops, and packing. answers: what their C++ kernels are asked before they are trusted.
"""
