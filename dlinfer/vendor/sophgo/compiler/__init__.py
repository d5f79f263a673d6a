"""Sophgo's compiler: the ONNX that it reads, its processes, and the cache of bmodels."""
