"""Graphs as ONNX, the one format at the border to compilers that live elsewhere or want a file.

In comes a function's graph, out comes an ONNX model or the reason why there is none. Engines call it.
"""
