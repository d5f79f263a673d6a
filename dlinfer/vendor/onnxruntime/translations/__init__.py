"""Translations to ONNX Runtime's own ops, used where these are faster, or where the standard ops are wrong."""
