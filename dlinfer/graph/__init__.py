"""HOW a model becomes a compiled graph.

The doors are here: ``backend`` (torch.compile), ``options``, ``engine`` (the base class of engines, and the search for
one) and ``observe`` (a report's view of a compilation). Behind them are rooms, from the lowest: torch_private, ir,
passes, report, cache, codec, capture, functional, onnx, lowering, selftest, engine_kit, direct.
"""
