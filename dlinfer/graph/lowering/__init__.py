"""From a captured graph to what runs: partition, the engine's regions, and the program that joins them.

In come a graph in the dialect and an engine, out comes a ``CompiledGraph``. The doors and artifacts call it.
"""
