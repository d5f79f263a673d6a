"""HOW a model becomes a compiled graph.

The doors are here: ``backend`` (torch.compile), ``options``, ``engine`` (what an engine must be, and how one is found)
and ``observe`` (what a report is told of a compilation). Behind them are rooms, from the lowest: seam, ir, passes,
report, capture, cache, engine_kit, functional, onnx, lowering, direct, explain.
"""
