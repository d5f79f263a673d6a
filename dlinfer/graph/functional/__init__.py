"""A region as a pure function: values in, values out, no writes and no aliases.

For engines that know values only. In comes a region, out come the function and what puts its results back into the
memory that the region wrote. Engines and the ONNX export call it.
"""
