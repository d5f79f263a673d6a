"""Functionalize regions: make graphs of values, without writes and aliases.

``function_of`` returns the functionalized graph. For each output that is the new content of an input, the result names
the input. Engines that have no in-place ops, and the ONNX export, use ``function_of``.
"""
