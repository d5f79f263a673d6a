"""Sophgo's compiler: ONNX as it takes it, and bmodels that it makes, in processes of its own and in a cache."""
