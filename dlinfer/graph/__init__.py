"""Compile models as graphs.

``backend`` serves torch.compile. ``engine`` has the base class of engines. The subpackages, lowest layer first:
torch_private, ir, interface, passes, report, cache, capture, codec, functional, onnx, lowering, selftest, engine_kit,
bound_call.
"""
