"""How ops are written for ONNX Runtime, where its own ops are faster than the standard ones or these are wrong."""
