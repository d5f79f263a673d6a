"""Translations to ONNX Runtime's own ops, used when these are faster or the standard ops are wrong."""
