"""Functionalize regions: ``function_of`` returns a graph of values, without writes and aliases.

The ONNX export and engines without in-place ops use it.
"""
