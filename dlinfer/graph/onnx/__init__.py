"""Export functionalized graphs to ONNX, for compilers that read a file or run in another process."""
