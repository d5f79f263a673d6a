"""Functionalize regions: values in, values out, no writes and no aliases.

``function_of`` returns the function, and how its results go back into the memory that the region wrote. Engines whose
graphs have only values, and the ONNX export, use it.
"""
