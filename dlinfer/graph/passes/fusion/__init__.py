"""Fusion rules: what to look for, what to put there, and why that is worth it. One rule a file.

``rules`` lists them in their order; only the registry of passes imports it.
"""
