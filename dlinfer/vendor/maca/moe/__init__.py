"""Mixture of experts: mcoplib's routing and sums, and a grouped product in Triton like the one in MetaX's vLLM."""
