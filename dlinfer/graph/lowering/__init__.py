"""Lowering: partition a graph, compile the engine's regions, and write the program that joins them.

It takes a graph in the dialect and an engine, and returns a ``CompiledGraph``. The doors and artifacts call it.
"""
