"""HOW a model becomes a compiled graph.

The entry points are here: ``backend`` (torch.compile), ``options``, ``engine`` (the base class of engines), ``observe``
and ``debug``. The rooms, from the lowest: torch_private, ir, interface, passes, report, cache, capture, codec,
functional, onnx, lowering, selftest, engine_kit, bound_call.
"""
