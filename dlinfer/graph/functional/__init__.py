"""Functionalize regions: make graphs of values, without writes and aliases.

``function_of`` returns the functionalized graph. For each output that is the new content of an input, it names the
input. The ONNX export uses it, and engines that have no in-place ops.
"""
