"""Mixture of experts: mcoplib's routing and sums, and a grouped product in Triton, as MetaX has it for vLLM."""
