"""Lowering: partition a graph, compile the engine's regions, and write the program that joins them.

The compile functions and artifacts call ``lower``, which returns a ``CompiledGraph``.
"""
