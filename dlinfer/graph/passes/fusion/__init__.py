"""Fusion rules, most with a file each: a pattern, and the fused op that replaces it. ``registry`` has their order."""
