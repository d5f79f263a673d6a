"""Base classes of graph engines, and their parts.

``value_engine`` is an engine for runtimes without pointers: the vendor says which nodes it takes, lowers a function and
compiles it. ``onnx_engine`` is that engine for runtimes that read ONNX; the vendor adds two methods.
docs/guides/write_an_engine.md builds one.
"""
