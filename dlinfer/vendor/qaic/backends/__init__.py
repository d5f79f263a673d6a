"""What runs a model behind a Session: a card, or ONNX Runtime on the CPU."""
