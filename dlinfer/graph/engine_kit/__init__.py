"""Base classes of graph engines, and their parts.

``value_engine`` is for runtimes without pointers. The vendor says which nodes it accepts, lowers functions and compiles
them. ``onnx_engine`` is a value engine for runtimes that read ONNX; the vendor implements two methods.
docs/guides/write_an_engine.md builds an engine.
"""
