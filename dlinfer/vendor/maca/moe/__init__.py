"""Mixture of experts. The experts' products are a grouped matmul in Triton, like the one in MetaX's vLLM.

mcoplib's kernels choose the experts, and sum the experts' outputs for each token.
"""
