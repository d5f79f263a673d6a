"""Base classes of graph engines, and their parts. docs/guides/write_an_engine.md builds an engine with them.

``value_engine`` serves runtimes without pointers. ``onnx_engine`` serves runtimes that read ONNX.
"""
