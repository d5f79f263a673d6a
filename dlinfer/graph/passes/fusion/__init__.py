"""Fusion rules. Each rule has a pattern, and a fused op that replaces the nodes of a match.

Most rules have a file of their own. ``registry`` lists them in order.
"""
