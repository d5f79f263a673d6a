"""The backends that run a Session's model: a card, or ONNX Runtime on the CPU."""
