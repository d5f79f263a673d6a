"""The two backends of a Session: a card, or ONNX Runtime on the CPU."""
