"""HOW a model becomes a compiled graph.

The entry points are here: ``backend`` (torch.compile), ``options``, ``engine`` (the base class of engines), ``observe``
and ``debug``. The subpackages, lowest layer first: torch_private, ir, interface, passes, report, cache, capture, codec,
functional, onnx, lowering, selftest, engine_kit, bound_call.
"""
