"""Checks that a region's integers fit the engine's integers, which have fewer bits than torch's.

It takes a graph, then the ranges of a call's inputs, and returns why the engine would be wrong for the call, or None.
"""
