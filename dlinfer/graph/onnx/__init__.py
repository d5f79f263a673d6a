"""Export of functionalized graphs to ONNX, for compilers in other processes or that read a file."""
