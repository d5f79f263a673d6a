"""Lowering: partition a graph, compile the engine's regions, and write the program that joins them.

``lower`` takes a captured graph and an engine, and returns a ``CompiledGraph``. The compile functions and artifacts
call it.
"""
