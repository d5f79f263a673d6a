"""Fusion rules, one a file: a pattern, and the fused op that replaces it. ``rules`` lists them in their order."""
