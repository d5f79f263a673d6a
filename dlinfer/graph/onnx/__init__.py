"""Graphs as ONNX, the one format at the border to compilers that live elsewhere or want a file."""
