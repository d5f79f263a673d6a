"""Compile models as graphs.

``backend`` is the torch.compile backend. ``engine`` has the base class of engines, which compile parts of a graph for
one vendor. The subpackages, lowest layer first: torch_private, ir, interface, passes, report, cache, capture, codec,
functional, onnx, lowering, selftest, engine_kit, bound_call.
"""
